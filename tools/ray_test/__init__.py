"""A run on a simulated Ray cluster that is scaled and shot at while it trains."""
