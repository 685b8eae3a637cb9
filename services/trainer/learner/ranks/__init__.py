"""Communication between trainer ranks: how they find each other, collectives with deadlines,
and whole tensors from shards. Nothing here knows batches or losses.
"""
