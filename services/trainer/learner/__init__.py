"""What each trainer rank computes: model, packed batches, update, checkpoints. On torch."""
