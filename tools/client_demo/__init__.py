"""Load a run that trains with many gRPC clients in two languages; `make demo-clients`."""
