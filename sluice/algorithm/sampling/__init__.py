"""Over-generation: which prompts are drawn, how many samples of each, and when a batch is full."""
