"""Run on simulated Ray clusters: one is scaled and shot at while it trains, one is a job."""
