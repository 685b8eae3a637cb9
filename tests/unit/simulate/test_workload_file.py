"""A workload's file: what it holds is taken, and each wrong field is named with its remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.simulate.workload import (
    BetaComponent,
    ResponseLengths,
    WorkloadDescription,
    read_workload,
)
from tests.support.source_tree import ROOT

WHOLE = {
    "pass_rates": [{"alpha": 0.25, "beta": 5, "weight": 0.6}, {"alpha": 6, "beta": 0.5}],
    "lengths": {
        "median_tokens_solved": 900,
        "median_tokens_unsolved": 2500.5,
        "sigma_between_prompts": 0,
        "sigma_within_prompt": 0.6,
        "max_tokens": 8192,
    },
    "num_prompts": 4096,
    "drift_per_version": -0.004,
}
DESCRIBED = WorkloadDescription(
    (BetaComponent(0.25, 5.0, 0.6), BetaComponent(6.0, 0.5, 1.0)),
    ResponseLengths(900.0, 2500.5, 0.0, 0.6, 8192),
    4096,
    -0.004,
)


def written(folder: Path, text: str, name: str = "workload.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_yaml_is_read(tmp_path: Path) -> None:
    assert read_workload(written(tmp_path, json.dumps(WHOLE))) == DESCRIBED
    few = "pass_rates:\n  - {alpha: 2, beta: 3}  # one kind\nnum_prompts: 1_000\n"
    description = read_workload(written(tmp_path, few))
    assert description == WorkloadDescription((BetaComponent(2.0, 3.0),), num_prompts=1000)


def test_the_example_of_the_document_is_read_and_names_every_field(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    example = re.search(r"^\$ cat workload\.yaml\n(.*?)^\$ ", text, re.MULTILINE | re.DOTALL)
    assert example is not None
    assert len(read_workload(written(tmp_path, example[1])).pass_rates) > 1
    for section, value in WHOLE.items():
        names = value[0] if isinstance(value, list) else value if isinstance(value, dict) else {}
        assert all(f"{name}:" in example[1] for name in (section, *names))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pass_rates": None}, "pass_rates = null: expected a list with each element a mapping"),
        ({"pass_rates": []}, "pass_rates = []: expected a list"),
        ({"pass_rates": [3]}, "pass_rates[0] = 3: expected a mapping of alpha, beta, weight"),
        (
            {"pass_rates": [{"alpha": 1, "beta": 1}, {"alpha": 0, "beta": 1}]},
            "pass_rates[1].alpha = 0: expected a number >= 0.01 and <= 1000000",
        ),
        (
            {"pass_rates": [{"alpha": 1}]},
            "pass_rates[0].beta is missing: a number >= 0.01",
        ),
        (
            {"pass_rates": [{"alpha": 1, "beta": 1, "weights": 1}]},
            "pass_rates[0].weights = 1 is no field; the fields are alpha, beta, weight",
        ),
        ({"lengths": [1]}, "lengths = [1]: expected a mapping of median_tokens_solved, median"),
        (
            {"lengths": {"max_tokens": 3.5}},
            "lengths.max_tokens = 3.5: expected an integer >= 2",
        ),
        (
            {"lengths": {"sigma_within_prompt": float("nan")}},
            "lengths.sigma_within_prompt = 'NaN': expected a number >= 0 and <= 5",
        ),
        ({"num_prompts": True}, "num_prompts = true: expected an integer >= 1"),
        (
            {"drift_per_version": "much"},
            "drift_per_version = much: expected a number >= -1 and <= 1",
        ),
        ({"num_prompts": 1e9}, "num_prompts = 1e+09: expected an integer"),
        ({"drift_per_version": None}, "drift_per_version = null: expected a number >= -1 and <= 1"),
        ({"colour": 3}, "colour = 3 is no field; the fields are pass_rates, lengths, num_"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_the_remedy(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = written(tmp_path, json.dumps(WHOLE | changes), "workload.yaml")
    with pytest.raises(ConfigError) as refused:
        read_workload(file)
    assert str(refused.value).startswith(f"configuration (--workload {file}): {message}")
    assert "\n" not in str(refused.value)


def test_all_bad_fields_are_named_at_once(tmp_path: Path) -> None:
    bad = WHOLE | {"num_prompts": 0, "drift_per_version": 2}
    with pytest.raises(ConfigError, match=r"2 problems\n  - num_prompts = 0.*\n  - drift_per_v"):
        read_workload(written(tmp_path, json.dumps(bad)))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("pass_rates: [", "w.yaml", "w.yaml is not valid YAML: line 1"),
        ("- 3", "w.yaml", r"the file = \[3\]: expected a mapping of pass_rates"),
        ("", "w.yaml", "the file = null: expected a mapping of pass_rates"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_workload(written(tmp_path, text, name))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*give a YAML file"):
        read_workload(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path)
