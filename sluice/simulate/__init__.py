"""A discrete-event simulation of a run, by the functions that the services run. In: a workload,
a fleet, a trainer and the rules of the loop. Out: the figures of the run, with no GPU and no
network.
"""
