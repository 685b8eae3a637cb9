"""The sandbox of tests: bubblewrap, where this machine gives it its namespaces."""

from __future__ import annotations

from functools import cache

import pytest

from sluice.config.schema.service import SandboxConfig
from sluice.errors import SluiceError
from sluice.sandbox.choice import proven_sandbox

BUBBLEWRAP = SandboxConfig(backend="bubblewrap")
OWN_COMMAND = SandboxConfig(
    backend="command", command=["/bin/sh", "-c", 'cd {folder} && exec "$@"', "sh"]
)
"""A command that contains nothing; its programs come from the tests."""


@cache
def why_no_bubblewrap() -> str:
    """Return why bubblewrap does not work here; empty: it does."""
    try:
        proven_sandbox(BUBBLEWRAP)
    except SluiceError as error:
        return str(error)
    return ""


def need_bubblewrap() -> None:
    """Skip the test where bubblewrap does not work."""
    if why_no_bubblewrap():
        pytest.skip(why_no_bubblewrap())
