"""The model and the data set of the quickstart, made offline. In: settings and a seed. Out: a
folder with tokenizer, data and a warm-started model. Only `model` loads torch.
"""
