"""From text to `RunConfig`.

In: a YAML file and overrides in Hydra's notation. Read them (`yaml_files` with `yaml_text`,
`overrides` with `override_values`), spell keys as sluice does (`keys`, `settings_tree`), resolve
references (`settings_tree`), check names and types (`loader`), convert verl's values
(`conversions`). Out: the configuration, and the keys that the user set.
"""
