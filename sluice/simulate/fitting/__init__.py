"""Fit a simulation to a recorded run, compare the two, sweep over fleets and plot. The
simulator itself uses nothing of it.
"""
