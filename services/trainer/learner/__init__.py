"""The computation of each trainer rank, in torch. Train batches and commands of rank 0 come in;
updated weights, checkpoints and update metrics go out. Layers, from the top: `rank_command`,
`policy_snapshots`, then `learner` and `sending_ranks`, `update`, `model`, `sharded_state`,
`weight_stream`, then `checkpoint`, `batch` and `tensor_layouts`, then `ranks`.
"""
