"""Rules between fields, and between the configuration and its files.

In: a `RunConfig`, and the keys that the user set. Out: problems, each with the key, its value and a
remedy. Rules never change the configuration.
"""
