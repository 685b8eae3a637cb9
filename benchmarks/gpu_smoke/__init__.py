"""Try sluice on one GPU: learner, engine, weights and the quickstart; `make gpu-smoke`."""
