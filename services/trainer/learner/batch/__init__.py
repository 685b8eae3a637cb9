"""A train batch as tensors: its tables, the share of this rank in each optimizer step, and
micro-batches packed without padding. Samples come in; tensors ready for one forward pass go
out.
"""
