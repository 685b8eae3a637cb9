"""The DAPO algorithm as pure functions: losses, advantages, which groups to sample and which
batch to form. Values come in, values go out. No clock, socket, logger or configuration object;
modules that need torch say so.
"""
