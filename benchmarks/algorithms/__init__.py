"""Train the quickstart job by other algorithms than DAPO; `make bench-algorithms`."""
