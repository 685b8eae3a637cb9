"""Find what would keep a run from working on this machine. In: a configuration, or none. Out:
findings, each with its remedy. A module holds the checks of one area: `machine`, `packages`,
`network`, `files`, `configuration`; `examination` lists and runs them. Nothing is changed.
"""
