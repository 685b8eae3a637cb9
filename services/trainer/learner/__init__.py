"""What each trainer rank computes, on torch. Train batches and commands of rank 0 come in;
updated weights, checkpoints and update metrics go out. Layers: worker, update, model, batch,
ranks.
"""
