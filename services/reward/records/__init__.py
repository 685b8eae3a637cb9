"""Observers of groups: statistics with token accounting, the yield guard, traces and files. In:
every event in the life of a group. Out: metrics of a batch, `groups.jsonl`, the archive of samples,
spans. They change no group.
"""
