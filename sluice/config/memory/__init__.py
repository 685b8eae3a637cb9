"""Estimate the device memory of a run. In: the model's shape and the configuration. Out: bytes
for trainer and engine, and the settings that would fit.
"""
