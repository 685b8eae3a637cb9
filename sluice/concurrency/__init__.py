"""How a process waits, works in threads, and ends.

`threads` has a thread that owns an object, a background measurement, a bounded background writer,
and threads that run plain methods (`MethodThreads`); `waits` registers waits and bounds them by
seconds or by progress, and `watchdog` ends a process that makes no progress; `answers` asks a
module in a process of its own, and `bounded_http` an HTTP server, within bounds of time and size;
`process` has a process's notes in the run's folder, its signals and its exit status.
"""
