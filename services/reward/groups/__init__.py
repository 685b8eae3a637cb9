"""The life of a group, from admission to a trained batch. In: prompts, samples from replicas
and grades. Out: train batches under a lease, and validation results.
"""
