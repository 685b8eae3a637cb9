"""The files that a configuration's Hydra ``defaults`` name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.explain import notices
from sluice.config.loading import yaml_files
from sluice.config.loading.loader import load_config, read_settings
from sluice.config.loading.yaml_files import read_document
from sluice.config.loading.yaml_text import parse_document
from sluice.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_users_own_defaults_are_read_below_the_file_and_above_verls() -> None:
    write("conf/base.yaml", "defaults: [ppo_trainer]\ndata: {train_batch_size: 64, seed: 3}\n")
    text = "defaults: [base, _self_]\ndata: {seed: 5, max_prompt_length: ${data.seed}}\n"
    file = write("conf/run.yaml", text.replace("${data.seed}", "'${data.seed}'"))
    data = load_config(file, ["data.seed=7"]).data
    assert (data.train_batch_size, data.seed, data.max_prompt_length) == (64, 7, 7)
    assert notices(read_settings(file, [])) == []


@pytest.mark.parametrize(
    ("defaults", "estimator"),
    [
        ("[ppo_trainer, _self_]", "gae"),
        ("[ppo_megatron_trainer, legacy_reward_impl, _self_]", "gae"),
        ("[ppo_trainer, mine]", "rloo"),
        ("[mine]", "rloo"),
        ("[]", "grpo"),
    ],
)
def test_verls_trainer_in_defaults_brings_verls_estimator(defaults: str, estimator: str) -> None:
    write("mine.yaml", "algorithm: {adv_estimator: rloo}")
    file = write("run.yaml", f"defaults: {defaults}\ndata: {{seed: 5}}\n")
    assert load_config(file, []).algorithm.adv_estimator == estimator


# The values are those that Hydra 1.3 composes from the same files.
@pytest.mark.parametrize(
    ("defaults", "values"),
    [
        ("[base]", {"a": 2, "b": 1, "d": {"x": 2, "y": 1}}),
        ("[base.yaml]", {"a": 2, "b": 1, "d": {"x": 2, "y": 1}}),
        ("[_self_, base]", {"a": 1, "b": 1, "d": {"x": 1, "y": 1}}),
        ("[base, group/one]", {"a": 2, "b": 1, "d": {"x": 2, "y": 1}, "group": {"c": 3}}),
        ("[group: one]", {"a": 2, "d": {"x": 2}, "group": {"c": 3}}),
        ("[group@d.e: one]", {"a": 2, "d": {"x": 2, "e": {"c": 3}}}),
        ("[/group/one@_global_]", {"a": 2, "d": {"x": 2}, "c": 3}),
        ("[group: [one, all]]", {"a": 2, "d": {"x": 2}, "group": {"c": 3}, "f": 4}),
        ("[group@d.e: all]", {"a": 2, "d": {"x": 2, "e": {"f": 4}}}),
        ("[group/inner]", {"a": 2, "d": {"x": 2}, "group": {"c": 5, "deep": {"g": 6}}}),
        ("[optional group: one]", {"a": 2, "d": {"x": 2}, "group": {"c": 3}}),
        ("[group: null, far]", {"a": 2, "d": {"x": 2}, "h": 7}),
    ],
)
def test_files_are_put_together_as_hydra_does(defaults: str, values: dict[str, object]) -> None:
    write("base.yaml", "{a: 1, b: 1, d: {x: 1, y: 1}}")
    write("group/one.yaml", "c: 3")
    write("group/all.yaml", "# @package _global_\nf: 4")
    write("group/inner.yaml", "defaults: [one, /deep: six, _self_]\nc: 5")
    write("deep/six.yaml", "g: 6")
    write("elsewhere/far.yaml", "h: 7")
    search = "hydra: {job: {}, searchpath: ['file://elsewhere', 'pkg://verl.trainer.config']}"
    file = write("run.yaml", f"{search}\ndefaults: {defaults}\na: 2\nd: {{x: 2}}\n")
    assert read_document(file) == {"hydra": {"job": {}}, **values}


def test_keys_stand_in_the_package_that_a_file_names() -> None:
    file = write("run.yaml", "# @package actor_rollout_ref\nrollout: {n: 5}\n")
    assert load_config(file, []).actor_rollout_ref.rollout.n == 5


def test_verls_own_files_are_not_read() -> None:
    verl = "verl/trainer/config"
    write(f"{verl}/ppo_trainer.yaml", "data: {seed: 1}")
    write(f"{verl}/optim/fsdp.yaml", "lr: 1")
    write(f"{verl}/mine.yaml", "data: {seed: 2}")
    entries = "[ppo_trainer, mine, optim@actor_rollout_ref.actor.optim: fsdp, _self_]"
    file = write("run.yaml", f"hydra: {{searchpath: ['file://{verl}']}}\ndefaults: {entries}\n")
    assert load_config(file, []).data.seed == 2
    found = {one.key: one.text for one in notices(read_settings(file, []))}
    assert "optim@actor_rollout_ref.actor.optim: fsdp" in found["defaults"]
    assert "ppo_trainer" not in found["defaults"]
    assert "groups of verl's files are not read" in found["defaults"]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[_self_, ppo_trainer]", "name ppo_trainer after other settings, .*; move ppo_trainer to"),
        ("[other, ppo_trainer, _self_]", "name ppo_trainer after other settings"),
        ("[ppo_trainer, bsae, _self_]", r"name bsae, and there is no bsae.yaml in conf; put it"),
        ("[round]", r"conf/run.yaml: its defaults lead back to it"),
        ("[broken]", r"conf/broken.yaml is not valid YAML: line 1"),
        ("[deep]", r"conf/deep.yaml nests lists or mappings hundreds of levels deep"),
    ],
)
def test_defaults_that_would_lose_settings_are_refused(defaults: str, message: str) -> None:
    write("conf/other.yaml", "data: {seed: 1}")
    write("conf/round.yaml", "defaults: [run]")
    write("conf/broken.yaml", "a: {")
    write("conf/deep.yaml", "[" * 100_000)
    file = write("conf/run.yaml", f"defaults: {defaults}\ndata: {{seed: 2}}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(file, [])


def test_each_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below.yaml").write_text("data: {train_batch_size: 8}", encoding="utf-8")
    (tmp_path / "run.yaml").write_text("defaults: [below]\na: 1", encoding="utf-8")
    parsed: list[str] = []

    def noting(text: str, source: str) -> object:
        parsed.append(Path(source).name)
        return parse_document(text, source)

    monkeypatch.setattr(yaml_files, "parse_document", noting)
    assert read_document(tmp_path / "run.yaml") == {"data": {"train_batch_size": 8}, "a": 1}
    assert parsed == ["run.yaml", "below.yaml"]
