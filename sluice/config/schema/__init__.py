"""The typed sections of the configuration, one file a section. Fields have defaults, bounds and
descriptions; no section reads a file or knows another section's rules.
"""
