"""Find what would keep a run from working on this machine. In: a configuration, or none. Out:
findings, each with its remedy. `machine`, `packages`, `files` and `configuration` look, `prompts`
and `reward` try the run's data and what grades it; `examination` lists and runs all checks. Nothing
is changed.
"""
