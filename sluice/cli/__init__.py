"""The `sluice` command. Each module holds a command and its output. In: command-line arguments.
Out: text for people, or JSON, and an exit status.
"""
