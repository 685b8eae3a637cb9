"""Rules over groups of samples: which are kept, what happens to failed samples, how old a batch
may be, which streams are given up. Scores, ages and times come in; decisions go out. Loads no
torch.
"""
