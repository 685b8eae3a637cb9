"""One model on this rank: load, shard, run forward, step, save and restore. Configurations,
micro-batches and gradients come in; logprobs, new weights and checkpoint files go out.
"""
