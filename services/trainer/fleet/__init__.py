"""The replicas that serve the policy: the members, and the version that each one serves.
Heartbeats and snapshots of the weights come in; joint transfers, commits and the list of
serving replicas go out.
"""
