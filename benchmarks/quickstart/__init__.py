"""Measure the quickstart over seeds and against TRL; `make bench-quickstart`."""
