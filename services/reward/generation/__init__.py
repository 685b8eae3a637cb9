"""Samples from replicas. In: a request for samples of one prompt. Out: finished samples, from one
replica or several, or the error that ends the prompt.
"""
