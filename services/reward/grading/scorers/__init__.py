"""Built-in scorers. In: a response and the ground truth. Out: a score. They run only in scorer
processes."""
