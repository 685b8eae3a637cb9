"""Samples from replicas. In: a request for samples of one prompt. Out: finished samples,
whichever replicas generated them, or one error that decides the prompt.
"""
