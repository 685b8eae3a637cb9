"""From text to `RunConfig`.

In: a YAML file and overrides in Hydra's notation. Read them (`yaml_files`, `overrides`), spell keys
as sluice does (`keys`, `settings_tree`), resolve references, check names and types (`loader`),
convert verl's values (`conversions`). Out: the configuration, and the keys that
the user set.
"""
