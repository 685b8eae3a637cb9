"""Benchmarks of what will run on devices, on the CPU; `make bench-devices`."""
