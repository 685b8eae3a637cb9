"""Measure episodes; `make bench-episodes`."""
