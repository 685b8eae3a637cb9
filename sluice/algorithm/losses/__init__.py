"""Policy and value losses, each with its paper. The response tokens of one micro-batch and global
counts come in; a scalar to differentiate and its metrics go out. `sluice.algorithm.registry`
names them.
"""
