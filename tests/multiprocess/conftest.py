"""What the tests of whole runs and of the reward service share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.reward_process import write_config
from tests.support.reward_scenarios import run_tree
from tests.support.small_run import Assets, make_assets


@pytest.fixture(scope="session")
def small_assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny model and its data, made once."""
    return make_assets(tmp_path_factory.mktemp("small-run"))


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Path]:
    """Writes a reward service's configuration: the prompts, then settings as `run_tree` takes."""

    def write(contents: list[str], **sections: Any) -> Path:
        return write_config(tmp_path / "run.yaml", run_tree(tmp_path, contents, **sections))

    return write
