"""The run configuration, in verl's language plus the `sluice` section. In: a YAML file and
overrides. Out: one frozen `RunConfig`, or one error that names everything wrong with it.
Importing it loads no torch.
"""
