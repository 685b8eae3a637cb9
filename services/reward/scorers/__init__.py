"""Scorers: what a response is worth. They run in scorer processes only."""
