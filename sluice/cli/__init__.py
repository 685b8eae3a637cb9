"""The `sluice` command. A module holds one command with what it prints. In: words of a command
line. Out: text for people, or JSON, and an exit status.
"""
