"""Find what on this machine would keep a run from working. In: a configuration, or none. Out:
findings, each with its remedy. A module holds the checks of one area; `examination` lists and
runs them.
"""
