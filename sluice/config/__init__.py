"""The run configuration: verl's keys plus the `sluice` section.

`schema` holds the typed keys and `run` the root of them; `catalogue` the status of every key,
verl's included; `loading` turns a file and overrides into a `RunConfig`; `rules` and `memory` find
its faults, as `problems.Problem`; `explain` and `check` write the reports. In: a YAML file and
overrides. Out: a frozen `RunConfig`, or an error that lists all faults. Importing it loads no
torch.
"""
