"""Over-generation: which prompts start, how many samples each gets, and when a batch is full.
Beliefs about pass rates and the state of the loop come in; numbers of groups and samples go
out. Loads no torch.
"""
