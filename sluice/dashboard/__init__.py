"""The live page of a run: curves, composition of groups, fleet, books and samples in a browser."""
