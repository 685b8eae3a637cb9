"""Commands that make, start and scale a run: `up`, `quickstart`, `prepare`, `certs`, `scale`."""
