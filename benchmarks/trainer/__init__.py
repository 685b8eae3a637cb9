"""`make bench-trainer`."""
