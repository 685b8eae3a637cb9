"""The estimate of a run's device memory.

In: the model's shape and the configuration. Out: bytes for trainer and engine, and settings that
would fit.
"""
