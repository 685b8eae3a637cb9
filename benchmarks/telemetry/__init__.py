"""Measure what traces and metrics cost a run; `make bench-telemetry`."""
