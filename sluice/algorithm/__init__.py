"""What DAPO is, as functions of values: no clock, socket, logger or configuration object.

Files on torch: `entropy`, `masked`, `probs_diff`, and most of `advantages`, `kl`, `losses` and
`rollout_correction`. All others need NumPy alone; this file imports nothing so that they stay
importable without torch.
"""
