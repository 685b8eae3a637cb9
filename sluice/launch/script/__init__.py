"""The configuration in a launch script of verl. In: a bash script, and what follows it on the
command line. Out: the `KEY=VALUE` arguments of its launch; nothing is trained or written.
"""
