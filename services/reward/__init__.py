"""The reward service: prompts in, graded and filtered train batches out. Loads no torch."""
