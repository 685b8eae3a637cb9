"""Send malformed, absurd and broken-off requests to live services; `make fuzz`."""
