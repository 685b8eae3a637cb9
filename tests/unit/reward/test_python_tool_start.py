"""An environment with the Python tool needs a sandbox that works, before the first episode."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.reward.episodes.worker_main import load_checked
from sluice.config.schema.reward import SandboxFusionConfig
from sluice.config.schema.service import SandboxConfig
from sluice.environment.source import EnvironmentSource
from sluice.errors import SluiceError
from sluice.sandbox.choice import VARIABLE, as_variable

FUSION = SandboxFusionConfig(url="http://127.0.0.1:1/run_code")
_FILE = """
from sluice.sandbox.python_tool import Python


class World(Python):
    pass
"""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"backend": "command", "command": ["false"]}', "sandbox"),
        (as_variable(SandboxConfig(), FUSION)[VARIABLE], "backend=bubblewrap or command"),
    ],
)
def test_a_worker_refuses_the_python_tool_where_no_sandbox_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, reason: str
) -> None:
    file = tmp_path / "tool_world.py"
    file.write_text(_FILE, encoding="utf-8")
    monkeypatch.setenv(VARIABLE, config)

    with pytest.raises(SluiceError, match=reason):
        load_checked(EnvironmentSource(str(file), "World"))
