"""What the tests of whole runs share."""

from __future__ import annotations

import pytest

from tests.support.small_run import Assets, make_assets


@pytest.fixture(scope="session")
def small_assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny model and its data, made once."""
    return make_assets(tmp_path_factory.mktemp("small-run"))
