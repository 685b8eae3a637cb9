"""What every key of verl's (and sluice's own) configuration means here, one table per section."""
