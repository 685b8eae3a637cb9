"""verl itself on the quickstart's job, on the CPU."""
