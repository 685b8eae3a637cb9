"""Measure what new weights cost the replicas; `make bench-sync`."""
