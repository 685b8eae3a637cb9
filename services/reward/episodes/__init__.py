"""Episodes: samples with several turns. In: a request for samples of one prompt. Out: the same as
the dispatcher returns; each sample has its turns and, if its environment grades it, its outcome.
"""
