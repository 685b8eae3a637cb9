"""Comparisons and measurements; each package prints one JSON object in its last line."""
