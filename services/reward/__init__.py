"""The reward service: prompts in, graded and filtered train batches out. Loads no torch.

`group_table` has the states of a group and the table of its events, `groups` the loop that drives
them; `app` connects everything. `group_table` is a module of its own, below `prompts` and
`records`, because both follow its events; the loop in `groups` stands above them.
"""
