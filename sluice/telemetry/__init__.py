"""What processes tell about themselves; at present their log lines."""
