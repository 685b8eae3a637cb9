"""Makes, from nothing and offline, the model and the data set that the quickstart job trains on."""
