"""Run a trainer rank's pass without memory, device or peers, and count its bytes."""
