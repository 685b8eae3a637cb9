"""A real Prometheus over a real run."""
