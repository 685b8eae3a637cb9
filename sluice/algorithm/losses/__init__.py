"""Policy and value losses, one paper a file. The response tokens of one micro-batch and global
counts come in; a scalar to differentiate and its metrics go out. `sluice.algorithm.registry`
names them.
"""
