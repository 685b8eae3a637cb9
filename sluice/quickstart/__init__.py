"""Make, from nothing and offline, the model and the data set that the quickstart trains on. In:
settings. Out: a folder with tokenizer, data and a warm-started model. Only `model` and
`vision_model` load torch.
"""
