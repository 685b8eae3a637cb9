"""Files of overrides: one a line, as copied from launch scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.loading.overrides import expand_overrides, read_override_file
from sluice.errors import ConfigError


def write(folder: Path, text: str, name: str = "launch.overrides") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def texts(folder: Path, text: str) -> list[str]:
    return [item.text for item in read_override_file(write(folder, text))]


def test_comments_blank_lines_and_continuations_have_no_meaning(tmp_path: Path) -> None:
    text = "# a launch\n\n  data.seed=1 \\\n+data.x=2  # why\n~data.shuffle\n"
    assert texts(tmp_path, text) == ["data.seed=1", "+data.x=2", "~data.shuffle"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainer.logger='[\"console\"]'", 'trainer.logger=["console"]'),
        ("'trainer.logger=[console]'", "trainer.logger=[console]"),
        ("trainer.experiment_name='1e-6'", "trainer.experiment_name='1e-6'"),
        ("trainer.experiment_name='a # b'", "trainer.experiment_name='a # b'"),
        ("trainer.experiment_name=a#b", "trainer.experiment_name=a#b"),
        (r"trainer.experiment_name='a\'b # c' # d", r"trainer.experiment_name='a\'b # c'"),
    ],
)
def test_quotes_that_a_shell_takes_away_are_taken_away(
    tmp_path: Path, line: str, expected: str
) -> None:
    assert texts(tmp_path, f"{line}\n") == [expected]


def test_a_file_stands_among_overrides_and_later_ones_win(tmp_path: Path) -> None:
    path = write(tmp_path, "data.seed=1\ndata.train_batch_size=8\n")
    for written in (f"@{path}", str(path)):
        config = load_config(None, ["data.seed=0", written, "data.train_batch_size=16"])
        assert (config.data.seed, config.data.train_batch_size) == (1, 16)
    assert load_config(path, ["data.seed=2"]).data.seed == 2


@pytest.mark.parametrize("name", ["launch.overrides", "launch.txt", "launch"])
def test_a_file_of_overrides_may_stand_for_the_configuration_file(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path, "# a launch\n+data.seed=4 \\\n", name)
    assert load_config(path, ["data.train_batch_size=8"]).data.seed == 4
    assert load_config(Path(f"@{path}"), []).data.seed == 4


def test_yaml_without_its_suffix_stays_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer: {experiment_name: a=b}\n", "run.conf")
    assert load_config(path, []).trainer.experiment_name == "a=b"


def test_the_command_line_has_no_source_and_a_line_of_a_file_has_one(tmp_path: Path) -> None:
    path = write(tmp_path, "\ndata.seed=1\n")
    found = expand_overrides(["data.seed=0", f"@{path}"], [])
    assert [item.source for item in found] == ["", f"{path}, line 2"]


def test_mistakes_in_a_file_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.sed: unknown key.*launch.overrides, line 2"):
        load_config(write(tmp_path, "data.seed=1\ndata.sed=1\n"), [])
    with pytest.raises(ConfigError, match=r"no value.*data.seed=VALUE"):
        load_config(write(tmp_path, "data.seed\n"), [])


@pytest.mark.parametrize(
    "line", ["python3 -m verl.trainer.main_ppo", "--config-name=dapo", "set -x"]
)
def test_lines_of_a_shell_script_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="keep only the key=value lines"):
        texts(tmp_path, f"{line} \\\n")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.overrides cannot be read"):
        load_config(None, [f"@{tmp_path}/nowhere.overrides"])
