"""Scrape a real run with a real Prometheus; `make observability-test`."""
