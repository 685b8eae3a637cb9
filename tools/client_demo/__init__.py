"""Many gRPC clients in two languages on a run that goes on training."""
