"""A process of a check that crashes or is killed is an error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.data.prompt_rows import PromptRow
from sluice.doctor import prompts
from sluice.doctor.prompts import measure_tokens
from sluice.doctor.reward import check_environment
from sluice.errors import ConfigError
from sluice.types import ChatMessage
from tests.support.doctor_findings import only, run_of

TOOLS = """
tools:
  - class_name: nowhere.Tool
    config: {type: native}
    tool_schema: {type: function, function: {name: f, description: d, parameters: {type: object}}}
"""
ROW = PromptRow((ChatMessage("user", "?"),), "mine", "1", {}, "row 0")


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL and printed nothing; look whether this ma"),
        ("raise ZeroDivisionError('boom')", "code 1: ZeroDivisionError: boom; correct the cause"),
        ("import sys; sys.exit(7)", "code 7 and printed nothing"),
        ("print('no answer')", "code 0 and printed nothing"),
    ],
)
def test_a_tokenizers_process_that_dies_is_no_measurement_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, how: str
) -> None:
    (tmp_path / "dying.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(prompts, "_MEASURE", "dying")
    with pytest.raises(ConfigError, match=f"tokenizing 1 prompts: its process ended with {how}"):
        measure_tokens(load_config(None, ["actor_rollout_ref.model.path=m"]), [ROW])


def test_tools_that_cannot_be_loaded_are_reported_with_their_own_remedy(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS, encoding="utf-8")
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    found = only(check_environment(run_of(f"{key}={tmp_path}/tools.yaml")), "problem")
    assert found.what.startswith(f"{key}: {tmp_path}/tools.yaml: nowhere.Tool cannot be loaded: ")
    assert found.remedy.startswith("name a class as module.Class")
