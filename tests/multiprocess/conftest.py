"""What the tests of whole runs and of the reward service share.

The process that only hands out tests reads this file too, so that its fixtures import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.small_run import Assets


@pytest.fixture(scope="session")
def small_assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny model and its data, made once."""
    from tests.support.small_run import make_assets

    return make_assets(tmp_path_factory.mktemp("small-run"))


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Path]:
    """Writes a reward service's configuration: the prompts, then settings as `run_tree` takes."""
    from tests.support.reward_process import write_config
    from tests.support.reward_scenarios import run_tree

    def write(contents: list[str], **sections: Any) -> Path:
        return write_config(tmp_path / "run.yaml", run_tree(tmp_path, contents, **sections))

    return write
