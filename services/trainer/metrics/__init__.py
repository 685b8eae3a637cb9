"""Where the run's numbers go."""
