"""Grade samples in worker processes that can be killed. In: samples, and responses that clients
send. Out: a score or a failure for each, never an invented number.
"""
