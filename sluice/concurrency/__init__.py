"""How waits, threads and processes begin and end: deadlines, the registry of waits, the
watchdog, stop signals, exit statuses. Knows no service and no gRPC.
"""
