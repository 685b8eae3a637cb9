"""Open the dashboard of a run that trains in a real browser; `make dashboard-test`."""
