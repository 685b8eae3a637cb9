"""The run configuration, in verl's language plus the `sluice` section.

`schema` holds the typed keys and `run` the root of them; `catalogue` the status of every key,
verl's included; `loading` turns a file and overrides into a `RunConfig`; `rules` and `memory` find
its faults, as `problems.Problem`; `explain` and `check` are the two reports. In: a YAML file and
overrides. Out: one frozen `RunConfig`, or one error that names everything wrong with it. Importing
it loads no torch.
"""
