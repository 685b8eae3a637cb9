"""Prove and measure the trainer: layouts, plans, states, speed; `make bench-trainer`."""
