"""Fit the simulator to a recorded run, and set both side by side."""
