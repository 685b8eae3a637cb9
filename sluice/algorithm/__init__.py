"""What DAPO is, as functions of values: no clock, socket, logger or configuration object.

Files on torch: `entropy`, `importance`, `probs_diff` and all of `losses` except its registry. All
others need NumPy alone; this file imports nothing so that they stay importable without torch.
"""
