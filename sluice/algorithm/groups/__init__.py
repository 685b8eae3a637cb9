"""Rules for groups of samples: which groups are kept, what happens to failed samples, how old a
batch may be, which streams are given up. In: scores, ages and times. Out: decisions. Loads no
torch.
"""
