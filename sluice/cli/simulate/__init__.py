"""`sluice simulate`: its options, and the tables of its results."""
