"""gRPC as sluice uses it: servers, channels, deadlines, retries, statuses."""
