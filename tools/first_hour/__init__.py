"""The trial of a new user: own model, data and reward, the how-tos, a wheel. `make first-hour`."""
