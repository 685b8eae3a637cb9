"""Correction for the gap between the policy that sampled the tokens and the one that trains.
Log probabilities of both come in; importance weights, a rejection mask and metrics go out. Only
`settings` loads without torch.
"""
