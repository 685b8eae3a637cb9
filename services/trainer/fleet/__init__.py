"""The replicas that serve the policy: who is a member, and which version each one serves.
Heartbeats and snapshots of the weights come in; joint transfers, commits and the list of
serving replicas go out.
"""
