"""`sluice config`: what it prints, for people and for machines, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.memory.rollout import GIB
from sluice.config.run import RunConfig
from sluice.plan import launch_plan
from sluice.plan.dry_run import PassBytes
from tests.support.counted_launch import answer_dry_runs

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SOUND = (
    "data.train_batch_size=64",
    f"{ROLLOUT}.n=8",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
)
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}


@pytest.fixture
def qwen(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    return ("--model-config", str(file))


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["config", *arguments], terminal_width=80)
    return result.exit_code, result.output


def check(*arguments: str) -> tuple[int, str]:
    return invoke("check", "--no-files", *arguments)


def check_json(*arguments: str) -> tuple[int, Any]:
    command = ["config", "check", "--no-files", "--json", *arguments]
    result = CliRunner().invoke(commands, command, terminal_width=80)
    return result.exit_code, json.loads(result.stdout)


def test_a_sound_configuration_is_exit_code_0_with_its_numbers() -> None:
    code, text = check(*SOUND)
    assert code == 0
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert lines["responses per step"][3:5] == ["512", "512"]
    assert lines["accumulation steps"][2:4] == ["64", "64"]
    assert "--model-config FILE" in text
    assert text.endswith("No problems found.\n")


def test_all_broken_rules_are_printed_with_one_line_that_mends_them() -> None:
    code, text = check(
        *SOUND, f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", f"{ACTOR}.ppo_mini_batch_size=24"
    )
    assert code == 1
    assert "sluice cannot run this:\n  - [whole-mini-batches] data.train_batch_size = 64" in text
    assert "verl would refuse this; sluice runs it:\n  - [micro-divides-mini] normalised" in text
    assert f"set {ACTOR}.ppo_mini_batch_size=16\n" in text
    assert "2 problems found. To fix: " in text.splitlines()[-1]


def test_what_only_verl_refuses_can_be_left_out() -> None:
    broken = [*SOUND, f"{ACTOR}.ppo_micro_batch_size_per_gpu=5"]
    code, text = check(*broken)
    assert code == 1
    assert "verl would refuse this; sluice runs it:\n  - [micro-divides-mini]" in text
    code, text = check("--rules", "here", *broken)
    assert code == 0
    assert "No problems found." in text


def test_missing_files_are_broken_rules_unless_files_are_left_out(tmp_path: Path) -> None:
    arguments = [*SOUND, f"data.train_files={tmp_path / 'gone.parquet'}"]
    code, text = invoke("check", *arguments)
    assert code == 1
    assert f"data.train_files: no file {tmp_path / 'gone.parquet'}" in text
    assert text.count("gone.parquet") == 1
    assert check(*arguments)[0] == 0


def test_unknown_keys_wrong_values_and_broken_rules_are_one_report() -> None:
    code, text = check(
        *SOUND,
        "data.train_batchsize=3",
        f"{ROLLOUT}.n=four",
        "algorithm.adv_estimator=grppo",
        f"{ROLLOUT}.max_model_len=5",
    )
    assert code == 1
    assert "data.train_batchsize: unknown key; did you mean data.train_batch_size?" in text
    assert f"{ROLLOUT}.n = four: expected an integer" in text
    assert "algorithm.adv_estimator = grppo: expected one of" in text
    assert f"{ROLLOUT}.max_model_len = 5 cannot hold" in text
    assert text.splitlines()[-1].endswith("4 problems found.")


def test_a_rule_about_a_wrong_value_is_not_applied_to_its_default() -> None:
    lone = (*SOUND, "algorithm.filter_groups.enable=true")
    assert "samples of a group of one never differ" in check(*lone, f"{ROLLOUT}.n=1")[1]
    assert "never differ" not in check(*lone, f"{ROLLOUT}.n=four")[1]
    noted = "nothing to compare with"
    assert noted in check(*SOUND, f"{ROLLOUT}.n=1")[1]
    assert noted not in check(*SOUND, f"{ROLLOUT}.n=four")[1]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """A dry run that takes 50 GiB, 20 with recomputed layers; what was counted."""

    def counted(config: RunConfig, _: object) -> PassBytes:
        recomputed = config.actor_rollout_ref.model.enable_gradient_checkpointing
        peak = (20 if recomputed else 50) * GIB
        return PassBytes(
            parameters=GIB,
            gradients=2 * GIB,
            moments=3 * GIB,
            log_prob=4 * GIB,
            kept=5 * GIB,
            forward=6 * GIB,
            backward=peak - 3 * GIB,
            step=8 * GIB,
            moved={},
        )

    return answer_dry_runs(monkeypatch, counted)


def test_a_trainer_is_counted_as_it_is_written_and_an_engine_estimated(
    qwen: tuple[str, ...], counting: list[RunConfig]
) -> None:
    written = (*SOUND, *qwen, "trainer.n_gpus_per_node=4")
    code, text = check(*written)
    assert code == 0
    assert counting[0].trainer.n_gpus_per_node == 4
    assert "8.19 billion parameters\n" in text
    lines = text.splitlines()
    (row,) = [n for n, line in enumerate(lines) if line.startswith("GiB on each trainer device")]
    held = ["1.00", "2.00", "3.00", "5.00"]
    phases = ["4.00", "7.00", "9.00", "50.00", "8.00"]
    assert lines[row + 2].split()[:-1] == [*held, *phases]
    _, found = check_json(*written)
    assert found["memory"]["trainer"]["phases"]["backward"] == 50 * GIB
    assert found["memory"]["trainer"]["parts"]["activations"] == 5 * GIB
    assert found["memory"]["rollout"][0]["layout"] == "as configured"


def test_a_published_model_is_counted_without_its_files_where_devices_are_named(
    counting: list[RunConfig],
) -> None:
    named = (*SOUND, "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "trainer.n_gpus_per_node=4")
    _, text = check(*named)
    assert "or --device-memory for a published model" in text
    assert counting == []
    _, text = check(*named, "--device-memory", "80")
    assert "8.19 billion parameters, devices of 80 GiB" in text
    assert len(counting) == 1


def test_what_does_not_fit_is_named_with_the_smallest_change_that_does(
    qwen: tuple[str, ...], counting: list[RunConfig]
) -> None:
    eight = ("trainer.n_gpus_per_node=8", f"{ROLLOUT}.gpu_memory_utilization=0.3")
    small = (*SOUND, *qwen, *eight, "--device-memory", "40")
    code, text = check(*small)
    assert code == 1
    assert "8.19 billion parameters, devices of 40 GiB" in text
    assert "Smallest tensor parallel size" in text
    assert f"set {ROLLOUT}.tensor_model_parallel_size=2" in text
    recompute = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    shortfall = "backward takes 50.00 GiB of the 36.0 that a plan fills"
    assert f"device of 40 GiB is too small: {shortfall}; set {recompute}\n" in text
    code, found = check_json(*small, recompute)
    assert [one["rule"] for one in found["violations"]] == ["engine-memory"]


def test_what_cannot_be_counted_is_guessed_with_the_reason(
    qwen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_plan, "find_spec", lambda _: None)
    code, text = check(*SOUND, *qwen)
    assert code == 0
    assert "GiB, not counted: torch and transformers not installed, with which" in text
    _, found = check_json(*SOUND, *qwen)
    assert found["memory"]["trainer"] is None
    assert found["memory"]["trainer_guess"] > 16 * 8e9
    assert "pip install 'sluice[torch]'" in found["memory"]["trainer_not_counted"]


def test_nothing_is_counted_for_wrong_keys(
    qwen: tuple[str, ...], counting: list[RunConfig]
) -> None:
    code, text = check(*SOUND, *qwen, f"{ROLLOUT}.n=four")
    assert (code, counting) == (1, [])
    assert "not counted: keys or values are wrong" in text


def test_a_tiny_model_is_not_counted(tmp_path: Path, counting: list[RunConfig]) -> None:
    file = tmp_path / "config.json"
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    file.write_text(json.dumps(sizes))
    code, found = check_json(*SOUND, "--model-config", str(file))
    assert code == 0
    assert found["memory"]["parameters"] == 1704
    assert found["memory"]["trainer"] is None
    assert found["memory"]["trainer_guess"] < GIB / 10
    assert counting == []
    assert "Memory: less than" in check(*SOUND, "--model-config", str(file))[1]


def test_json_holds_rules_remedies_and_numbers() -> None:
    code, found = check_json(*SOUND, f"{ACTOR}.ppo_micro_batch_size_per_gpu=5")
    assert code == 1
    (one,) = found["violations"]
    assert (one["rule"], one["severity"]) == ("micro-divides-mini", "warning")
    assert found["remedies"] == one["remedy"] == [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]
    assert {"name", "formula", "as_verl", "here"} == set(found["quantities"][0])
    assert found["memory"] is None


def test_steps_per_epoch_are_those_of_the_trained_rows_where_they_can_be_counted(
    tmp_path: Path,
) -> None:
    data = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"prompt": list(range(200))}), data)
    _, found = check_json(*SOUND, f"data.train_files={data}")
    steps = found["quantities"][-1]
    assert (steps["as_verl"], steps["here"]) == (3, 3)
    _, found = check_json(*SOUND, f"data.train_files={data}", "data.train_max_samples=130")
    assert found["quantities"][-1]["here"] == 2
    _, found = check_json(*SOUND, f"data.train_files={data}", "data.deduplicate=true")
    assert not any("epoch" in one["name"] for one in found["quantities"])
    data.write_bytes(b"no parquet")
    _, found = check_json(*SOUND, f"data.train_files={data}")
    assert not any("epoch" in one["name"] for one in found["quantities"])


def test_a_yaml_file_and_overrides_after_it_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {train_batch_size: 64}\n"
        "actor_rollout_ref:\n"
        "  actor: {ppo_mini_batch_size: 32, ppo_micro_batch_size_per_gpu: 4}\n"
        "  rollout: {n: 8, log_prob_micro_batch_size_per_gpu: 4}\n"
    )
    assert check(str(file))[0] == 0
    code, found = check_json(str(file), f"{ROLLOUT}.n=6", "trainer.n_gpus_per_node=5")
    assert code == 1
    assert {one["rule"] for one in found["violations"]} >= {"mini-rows", "real-batch"}


@pytest.mark.parametrize(("name", "mark"), [("a.overrides", ""), ("a.txt", ""), ("a.txt", "@")])
def test_a_file_of_overrides_is_checked_with_verls_own_keys(
    tmp_path: Path, name: str, mark: str
) -> None:
    file = tmp_path / name
    lines = [*SOUND, "# a comment", "", f"{ACTOR}.ulysses_sequence_parallel_size=3"]
    lines.append(f"{ACTOR}.fsdp_config.offload_policy=true")
    file.write_text("\n".join(lines))
    code, found = check_json(f"{mark}{file}", "trainer.n_gpus_per_node=4")
    assert code == 1
    assert any("offload_policy = true has no effect" in n for n in found["notices"])
    assert [one["rule"] for one in found["violations"]] == ["parallel-layout"]


def test_a_key_is_explained_and_all_are_listed() -> None:
    code, text = invoke("explain", f"{ACTOR}.clip_ratio_high")
    assert code == 0
    assert text.startswith(f"{ACTOR}.clip_ratio_high\n")
    assert "  default: 0.2" in text
    code, text = invoke("explain", f"{ACTOR}.clip_ratio_high", "--json")
    assert code == 0
    assert json.loads(text)["path"] == f"{ACTOR}.clip_ratio_high"
    code, text = invoke("explain", "--json")
    assert code == 0
    assert f"{ACTOR}.clip_ratio_high" in {one["path"] for one in json.loads(text)}
    assert f"\n{ACTOR}.clip_ratio_high" in invoke("explain")[1]


def test_the_keys_of_a_section_are_listed_in_any_spelling_of_it() -> None:
    code, text = invoke("explain", "reward_model.overlong_buffer")
    assert code == 0
    assert text.startswith("4 keys\n")
    assert "\nreward.reward_kwargs.overlong_buffer_cfg.penalty_factor " in text
    assert invoke("explain", "no.section")[0] == 1


def test_the_keys_that_were_set_are_counted_by_status() -> None:
    sound = (*SOUND, f"{ACTOR}.megatron.context_parallel_size=1")
    _, text = check(*sound)
    assert text.splitlines()[-1].startswith(
        "6 keys are set: 4 honoured, 2 not applicable. No problems"
    )
    _, found = check_json(*sound)
    assert found["keys"][f"{ROLLOUT}.n"] == "honoured"
    assert found["keys"][f"{ACTOR}.megatron.context_parallel_size"] == "not applicable"


@pytest.mark.usefixtures("counting")
def test_lines_of_a_pipe_are_neither_wrapped_nor_padded(qwen: tuple[str, ...]) -> None:
    _, text = check(*SOUND, *qwen)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert any(len(line) > 120 for line in text.splitlines())
