"""Observers of groups: statistics with token accounting, the yield guard, traces and files. In:
every event of a group. Out: metrics per batch, `groups.jsonl`, the sample archive, spans. They
change no group.
"""
