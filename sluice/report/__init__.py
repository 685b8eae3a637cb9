"""What a finished run amounts to. In: the files that the trainer wrote. Out: `summary.json`,
accounting for people, and a page to look at.
"""
