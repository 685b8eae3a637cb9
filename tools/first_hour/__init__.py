"""The trial of a new user: own model, data, reward and launch script. `make first-hour`."""
