"""Measure strategies of over-generation, simulated and real; `make bench-sampling`."""
