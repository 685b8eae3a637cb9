"""Train every recipe in small, and see that each learns; `make bench-recipes`."""
