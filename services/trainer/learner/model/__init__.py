"""One model on this rank: load, shard, run passes, step, save and restore. Configurations,
micro-batches and gradients come in; logprobs, new weights and checkpoint files go out.
"""
