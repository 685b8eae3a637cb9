"""Values of a file that the words of a command replace are named, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.explain import replaced_values

FILES = {
    "job.yaml": "trainer:\n  n_gpus_per_node: 8\n  save_freq: 5\nsluice: {shutdown_grace_s: 60}\n",
    "job.overrides": "trainer.n_gpus_per_node=8\ntrainer.save_freq=5\nsluice.shutdown_grace_s=60\n",
}


@pytest.mark.parametrize("name", FILES)
def test_each_value_that_is_replaced_is_named_with_the_one_that_holds(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(FILES[name], encoding="utf-8")
    words = ["trainer.n_gpus_per_node=1", "trainer.save_freq=5", "trainer.nnodes=1"]
    found = replaced_values(file, [*words, "~sluice.shutdown_grace_s"])
    assert [one.text for one in found] == [
        f"trainer.n_gpus_per_node = 8 of {file} has no effect: the command sets it to 1",
        f"sluice.shutdown_grace_s = 60 of {file} has no effect: the command removes it",
    ]
    assert replaced_values(file, ["trainer.save_freq=5"]) == []


def test_a_reference_is_compared_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("trainer: {nnodes: 2, save_freq: '${trainer.nnodes}'}\n", encoding="utf-8")
    (line,) = replaced_values(file, ["trainer.nnodes=1"])
    assert line.text.startswith("trainer.nnodes = 2 of")


def test_without_a_file_nothing_is_replaced() -> None:
    assert replaced_values(None, ["trainer.nnodes=1"]) == []
