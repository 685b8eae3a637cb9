"""Plan the published launches on their devices."""
