"""Build the documentation site: hooks for mkdocs; `make docs`."""
