"""A run on the nodes of a cluster. Place processes, look at their nodes, keep them by a host
process there; only `ray_cluster` imports Ray.
"""
