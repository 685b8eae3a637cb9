"""The reward service: prompts in, graded and filtered train batches out. Loads no torch.

`group` has the states of a group and the table of its events, `groups` the loop that drives them;
`app` connects everything.
"""
