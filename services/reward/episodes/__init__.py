"""Episodes: samples of several turns. In: a request for samples of one prompt. Out: the same as the
dispatcher's, each sample with its turns and, if its environment decides it, its outcome.
"""
