"""The train loop of rank 0 and what it drives. Train batches come in from the reward service;
trained batches, published versions, checkpoints and step metrics go out. The loop itself uses
no torch.
"""
