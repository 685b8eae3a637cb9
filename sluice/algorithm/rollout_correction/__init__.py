"""Correction for the gap between the policy that drew the tokens and the one that trains.

Tokens are flat: tensors [tokens] of all response tokens without padding, and `row_index` [tokens],
which says whose they are. `thresholds` and `plan` need no torch.
"""
