"""From text to `RunConfig`: read YAML and overrides, spell keys, resolve references, convert
verl's values, check names and types. Out: the configuration, and the keys that the user set.
"""
