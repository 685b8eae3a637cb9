"""The numbers of a run. In: the files that the trainer wrote. Out: its record, `summary.json`, and
its accounting for people.
"""
