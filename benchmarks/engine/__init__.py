"""Measure each engine's tokens per second; `make bench-engine`."""
