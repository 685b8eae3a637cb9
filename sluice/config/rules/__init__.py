"""Rules between fields, and between the configuration and its files. In: a `RunConfig`. Out:
problems, each with the field, its value and a remedy. Nothing is changed here.
"""
