"""How a process waits, works in threads, and ends.

`threads` has a thread that owns an object, a background measurement and a bounded background
writer; `deadlines` bounds waits by seconds or by progress; `waits` registers them and `watchdog`
ends a process that makes no progress; `process` has its notes in the run's folder, its signals and
its exit status.
"""
