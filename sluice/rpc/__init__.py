"""gRPC as sluice uses it: servers and channels with limits, deadlines, retries, tokens and one
table of statuses. Stubs and servicers come in; calls that raise sluice's own errors go out.
"""
