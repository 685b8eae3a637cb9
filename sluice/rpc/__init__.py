"""Use gRPC: servers and channels with limits, deadlines, retries, tokens, and one table that maps
errors to statuses. In: stubs and servicers. Out: calls that raise sluice's errors, servers and
credentials.
"""
