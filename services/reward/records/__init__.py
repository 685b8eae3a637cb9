"""Observers of groups: counters, token accounting, traces and files. In: every event in the
life of a group. Out: metrics of a batch, outcomes for clients, `groups.jsonl`, spans. They
change no group.
"""
