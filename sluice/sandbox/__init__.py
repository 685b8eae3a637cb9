"""Run programs that nobody trusts. In: a command line, files, input and limits. Out: what the
program printed, and how it ended. Failure to contain it is an error, never a result.
"""
