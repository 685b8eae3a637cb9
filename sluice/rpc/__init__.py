"""gRPC as sluice uses it: servers and channels with limits, deadlines, retries, tokens, and one
table that maps errors to statuses. Stubs and servicers come in. Calls that raise sluice's own
errors, servers and credentials go out.
"""
