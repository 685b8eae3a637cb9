"""Evaluations without a launch, recipes, guards and sources; `make bench-eval`."""
