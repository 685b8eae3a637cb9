"""Start the services as processes: on this machine, on the nodes of a cluster, or one in each
container. In: a checked configuration. Out: running processes and an exit status. No logic of
the loop lives here.
"""
