"""The twin: a discrete-event simulation of a run, by the functions that the services run."""
