"""Fit the simulator to a recorded run, set both side by side, and plot simulations."""
