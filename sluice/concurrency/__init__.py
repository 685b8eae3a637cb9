"""How waits and processes end: deadlines, stop signals, supervisors, exit codes."""
