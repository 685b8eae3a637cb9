"""`python -m sluice`: the `sluice` command."""

from __future__ import annotations

from sluice.cli.entry import app

app()
