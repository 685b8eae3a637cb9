"""`sluice eval --model`: what it keeps of a run's configuration, and whose folder it continues."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.run.evaluation import (
    EvaluationOrder,
    default_output,
    evaluate_model,
    evaluation_config,
)
from sluice.cli.run.evaluation_origin import ORIGIN_NAME, claim_folder
from sluice.cli.run.up import Display
from sluice.config.rules.checks import relation_problems
from sluice.doctor import files
from sluice.errors import ConfigError
from sluice.evaluation.results import RESULTS_NAME
from sluice.launch.service_spec import local_services, with_ports
from sluice.service_contract import CONFIG_NAME
from tests.support.stored_evaluation import evaluation, graded, store

RUN = """
data: {train_files: train.parquet, train_batch_size: 512, max_response_length: 4096}
actor_rollout_ref:
  model: {lora_rank: 8}
  actor: {ppo_mini_batch_size: 128, fsdp_config: {ulysses_sequence_parallel_size: 4}}
  rollout: {n: 16, val_kwargs: {top_p: 0.7}}
algorithm: {adv_estimator: gae, filter_groups: {enable: true, metric: acc}}
trainer: {n_gpus_per_node: 8, nnodes: 16}
reward: {custom_reward_function: {path: my_reward.py}}
sluice: {asynchrony: {max_staleness: 4}, environment: {path: env.py}}
"""


@pytest.fixture
def order(tmp_path: Path) -> EvaluationOrder:
    """A model, one benchmark, and the configuration of a run on 128 devices."""
    model, rows = tmp_path / "model", tmp_path / "rows.parquet"
    model.mkdir()
    for file in (model / "config.json", model / "model.safetensors", rows):
        file.write_text("{}", encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    return EvaluationOrder(model, {"rows": rows}, tmp_path / "out", tmp_path / "run.yaml")


def test_scorers_lengths_sampling_and_environment_are_the_runs_and_training_is_gone(
    order: EvaluationOrder,
) -> None:
    config = evaluation_config(order)
    assert config.data.max_response_length == 4096
    assert config.reward.custom_reward_function.path == "my_reward.py"
    assert config.sluice.environment.path == "env.py"
    assert config.actor_rollout_ref.rollout.val_kwargs.top_p == 0.7
    assert config.sluice.evaluation.benchmarks == ["rows"]
    assert config.data.val_files == [str(order.benchmarks["rows"])]
    assert (config.data.train_files, config.actor_rollout_ref.model.lora_rank) == (None, 0)
    assert (config.trainer.nnodes, config.trainer.device) == (1, "cpu")
    assert relation_problems(config) == []


def test_a_run_with_sources_and_guards_can_be_evaluated(order: EvaluationOrder) -> None:
    sources = "{math: {files: math.parquet, share: 0.5}, code: {files: code.parquet, share: 0.5}}"
    rules = "[{action: hold, metric: val-core/accuracy/mean, limit: 0.1}]"
    text = f"sluice: {{sources: {sources}, guards: {{rules: {rules}}}}}"
    (order.output.parent / "run.yaml").write_text(text, encoding="utf-8")
    assert relation_problems(evaluation_config(order)) == []


def test_the_ports_of_a_live_run_are_left_to_it(order: EvaluationOrder) -> None:
    ports = "{port: 7001, health_port: 7002, metrics_port: 7003}"
    text = f"sluice: {{reward: {{endpoint: {ports}}}, rollout: {{endpoint: {ports}}}, "
    text += "dashboard: {port: 7004}}"
    (order.output.parent / "run.yaml").write_text(text, encoding="utf-8")
    service = evaluation_config(order).sluice
    assert service.dashboard.port is None
    for endpoint in (service.reward.endpoint, service.rollout.endpoint):
        assert (endpoint.port, endpoint.health_port, endpoint.metrics_port) == (0, 0, 0)


@pytest.mark.parametrize(
    ("samples", "temperature", "expected"),
    [(None, None, 0.0), (4, None, 1.0), (4, 0.6, 0.6), (1, None, 0.0), (4, 0.0, 0.0)],
)
def test_several_samples_are_not_greedy_unless_asked_for(
    order: EvaluationOrder, samples: int | None, temperature: float | None, expected: float
) -> None:
    order = replace(order, samples_per_prompt=samples, temperature=temperature)
    assert evaluation_config(order).actor_rollout_ref.rollout.val_kwargs.temperature == expected


def test_a_folder_continues_with_the_same_settings_on_other_replicas(
    order: EvaluationOrder,
) -> None:
    claim_folder(order.output, evaluation_config(order))
    store(order.output, [graded(0, 1.0)])
    claim_folder(order.output, evaluation_config(replace(order, replicas=4)))


def test_a_folder_without_a_response_is_that_of_the_newest_settings(order: EvaluationOrder) -> None:
    claim_folder(order.output, evaluation_config(order))
    store(order.output, [])
    other = evaluation_config(replace(order, samples_per_prompt=8))
    claim_folder(order.output, other)
    store(order.output, [graded(0, 1.0)])
    claim_folder(order.output, other)


def test_the_folder_of_a_training_run_is_refused_and_stays_as_it_is(order: EvaluationOrder) -> None:
    order.output.mkdir()
    (order.output / CONFIG_NAME).write_text(RUN, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds a run, or responses .* give another --output"):
        claim_folder(order.output, evaluation_config(order))
    assert [one.name for one in order.output.iterdir()] == [CONFIG_NAME]


def test_responses_of_unknown_origin_are_refused(order: EvaluationOrder) -> None:
    store(order.output, [graded(0, 1.0)])
    with pytest.raises(ConfigError, match=r"responses of unknown origin \(no evaluation\.json\)"):
        claim_folder(order.output, evaluation_config(order))


@pytest.mark.parametrize("text", ["", '{"settings": {', "{}", "[]", "\xff"])
def test_a_damaged_note_of_the_origin_is_refused(order: EvaluationOrder, text: str) -> None:
    order.output.mkdir()
    (order.output / ORIGIN_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"evaluation\.json cannot be read .* another --output"):
        claim_folder(order.output, evaluation_config(order))


def test_a_second_command_leaves_the_results_of_an_active_one(
    order: EvaluationOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(_: Path) -> tuple[()]:
        return ()

    monkeypatch.setattr("sluice.cli.run.checked.launched_processes", answers)
    monkeypatch.setattr("sluice.cli.run.evaluation.check_before_start", lambda run, _: run)
    results = evaluation(order.output, [graded(0, 1.0)]) / RESULTS_NAME
    with pytest.raises(ConfigError, match="another run is active in this folder"):
        evaluate_model(order, Display(Console(quiet=True)))
    assert results.is_file()
    assert not (order.output / ORIGIN_NAME).exists()


def test_an_output_that_cannot_be_written_is_named(
    order: EvaluationOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.cli.run.evaluation.check_before_start", lambda run, _: run)
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"^--output .*/out: cannot be written by this user; "):
        evaluate_model(order, Display(Console(quiet=True)))
    assert not order.output.exists()


def test_a_folder_of_other_settings_is_refused(order: EvaluationOrder) -> None:
    claim_folder(order.output, evaluation_config(order))
    store(order.output, [graded(0, 1.0)])
    other = evaluation_config(replace(order, samples_per_prompt=8))
    with pytest.raises(ConfigError, match=r"val_kwargs\.n = 1 is now 8; .*give another --output"):
        claim_folder(order.output, other)


@pytest.mark.parametrize("name", ["function_tool_path", "tool_config_path"])
def test_a_folder_of_tools_that_have_changed_since_is_refused(
    order: EvaluationOrder, name: str
) -> None:
    tools = order.output.parent / "tools.py"
    tools.write_text("", encoding="utf-8")
    key = f"actor_rollout_ref.rollout.multi_turn.{name}={tools}"
    config = evaluation_config(replace(order, overrides=[key]))
    claim_folder(order.output, config)
    store(order.output, [graded(0, 1.0)])
    os.utime(tools, ns=(1, 1))
    with pytest.raises(ConfigError, match=r"tools\.py was written again\); give another --output$"):
        claim_folder(order.output, config)


def test_of_the_scorer_pool_only_what_decides_grades_is_kept(order: EvaluationOrder) -> None:
    claim_folder(order.output, evaluation_config(order))
    store(order.output, [graded(0, 1.0)])
    pool = "reward.scorer_pool"
    workers = replace(order, overrides=[f"{pool}.num_workers=3", f"{pool}.timeout_s=30"])
    claim_folder(order.output, evaluation_config(workers))
    shorter = replace(order, overrides=[f"{pool}.max_response_chars=10"])
    with pytest.raises(ConfigError, match=r"max_response_chars = 200000 is now 10"):
        claim_folder(order.output, evaluation_config(shorter))


def test_a_folder_of_a_model_that_has_changed_since_is_refused(order: EvaluationOrder) -> None:
    claim_folder(order.output, evaluation_config(order))
    store(order.output, [graded(0, 1.0)])
    other = evaluation_config(replace(order, samples_per_prompt=8))
    os.utime(order.model / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConfigError, match=r"safetensors was written again\); .*, or the settings"):
        claim_folder(order.output, other)
    with pytest.raises(ConfigError, match=r"model\.safetensors was written again\); give an"):
        claim_folder(order.output, evaluation_config(order))
    (order.model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is gone\); give another --output$"):
        claim_folder(order.output, evaluation_config(order))


@pytest.mark.parametrize(
    ("model", "output"),
    [
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/runs/mine/checkpoints/global_step_20/actor/huggingface", "mine-global_step_20"),
        ("/runs/mine/checkpoints/global_step_20", "mine-global_step_20"),
    ],
)
def test_the_folder_has_the_models_name(model: str, output: str) -> None:
    assert default_output(Path(model)) == Path("evals") / output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/a", "--benchmark", "math-500"], "--benchmark needs --model or --follow"),
        (["runs/a", "--engine", "vllm"], "--engine needs --model or --follow"),
        (["runs/a", "--data-dir", "data"], "--data-dir needs --model or --follow"),
        (["runs/a", "--replicas", "2"], "--replicas needs --model or --follow"),
        (["runs/a", "--logs"], "--logs needs --model or --follow"),
        (["--model", "a", "--benchmark", "b", "--run", "runs/a"], "--run is for"),
        (
            ["--model", "a", "--benchmark", "b", "--wait", "3"],
            "--wait is for the policy of a running run",
        ),
        (["--follow", "runs/a", "--wait", "3"], "--wait is for the policy of a running run"),
        (["--model", "a"], "--model needs --benchmark"),
        (["--model", "a", "--follow", "b"], "leave one out"),
    ],
)
def test_an_option_is_refused_where_it_would_be_ignored(arguments: list[str], message: str) -> None:
    shown = CliRunner().invoke(commands, ["eval", *arguments])
    assert isinstance(shown.exception, ConfigError)
    assert message in str(shown.exception)


def test_the_replicas_have_all_devices_and_no_trainer_starts(
    order: EvaluationOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    order = replace(
        order,
        replicas=2,
        engine="vllm",
        overrides=["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
    )
    specs = local_services(with_ports(evaluation_config(order)), order.output / "config.yaml")
    assert {spec.name: spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in specs} == {
        "reward": None,
        "evaluation": None,
        "rollout-0": "0,1",
        "rollout-1": "2,3",
    }
    assert [spec.name for spec in specs if spec.ends_run] == ["evaluation"]
    assert all(spec.restarts.max_restarts for spec in specs)
