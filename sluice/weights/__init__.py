"""The weight wire, both ends. A trainer's tensors come in; a version with verified digests goes
out on every replica. One process group an epoch, given up at its first failure.
"""
