"""The reward service: prompts in, graded and filtered train batches out. Loads no torch.

`group_table` defines the states and events of a group, `groups` contains the loop that drives them,
and `app` connects everything. `group_table` stands below `prompts` and `records`, which observe its
events; `groups` stands above them.
"""
