"""The typed sections of the configuration.

In: nothing. Out: structs whose fields have defaults, bounds and descriptions. No section reads a
file or knows another section's rules.
"""
