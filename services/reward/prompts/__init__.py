"""The sources of prompts: the data set, and clients that submit them. In: data files and
submissions. Out: the next prompt to start, and what earlier attempts showed about it.
"""
