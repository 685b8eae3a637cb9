"""The `sluice` command, one file for each of its commands."""
