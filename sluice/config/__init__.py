"""The run configuration: schema, loader, checks. Importing it loads no torch."""
