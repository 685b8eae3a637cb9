"""The three services; each runs as processes of its own and imports none of the others."""
