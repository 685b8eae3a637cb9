"""Scorers. In: a response and the ground truth. Out: a score. They run in scorer processes only."""
