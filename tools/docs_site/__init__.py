"""Build the documentation site: hooks for mkdocs, and the diagrams' renderer; `make docs`."""
