"""Start the services as processes: on this machine, on the nodes of a cluster, or one per
container. In: a checked configuration. Out: running processes and an exit status. It contains no
training logic.
"""
