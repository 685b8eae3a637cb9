"""Malformed, absurd and broken-off requests against live services."""
