"""The documentation site: what mkdocs does not do by itself, and checks of what it has built."""
