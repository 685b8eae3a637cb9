"""Start a stand-alone evaluation of a model's files, and follow it to its results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import typer

from sluice.cli.run.checked import check_before_start, refuse_beside_another, require_writable
from sluice.cli.run.ending import print_failures
from sluice.cli.run.evaluation_origin import claim_folder
from sluice.cli.run.up import Display, show_launcher_messages, start_processes
from sluice.cli.terminal import print_line
from sluice.cli.watch.live_view import EvaluationView
from sluice.config.loading.loader import ReadRun, load_config, settings_of
from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorConfig, CriticConfig
from sluice.config.schema.algorithm import AlgorithmConfig
from sluice.config.schema.service import (
    AsynchronyConfig,
    EndpointConfig,
    GuardsConfig,
    SamplingConfig,
    ServiceConfig,
    TrainerServiceConfig,
    WeightsConfig,
)
from sluice.config.schema.trainer import TrainerConfig
from sluice.errors import ConfigError
from sluice.evaluation.page import PAGE_NAME, write_report
from sluice.evaluation.results import RESULTS_NAME, Results, read_results
from sluice.launch.plan import with_absolute_paths
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED
from sluice.report.progress import duration_text
from sluice.service_contract import CONFIG_NAME

_SAMPLED = 1.0
EVALUATIONS = Path("evals")
_NO_NAMES = ("actor", "checkpoints", "huggingface")
_STEP, _PARTS_OF_A_CHECKPOINT = "global_step_", 2


@dataclass(frozen=True, slots=True)
class EvaluationOrder:
    """What to evaluate.

    Attributes:
        model: folder of a Hugging Face model, or a checkpoint ``global_step_N``.
        benchmarks: files by name; see `benchmark_files`.
        output: folder for all that the evaluation writes.
        config: YAML file with the chat template, the scorers, the environment, and the sampling of
            validation; ``None``: the defaults.
        overrides: further keys, which override it.
        samples_per_prompt: ``None`` for the configured value.
        temperature: ``None``: as configured, but 1 for several samples of a prompt, which would
            all be equal.
        engine: ``None`` for the configured value.
        replicas: ``None`` for the configured value.
    """

    model: Path
    benchmarks: Mapping[str, Path]
    output: Path
    config: Path | None = None
    overrides: list[str] = field(default_factory=list)
    samples_per_prompt: int | None = None
    temperature: float | None = None
    engine: str | None = None
    replicas: int | None = None


def evaluate_model(order: EvaluationOrder, display: Display) -> Results:
    """Evaluate, and return the results; continue where an earlier evaluation in the folder ended.

    Every process has ended when this returns or raises.

    Raises:
        ConfigError: the configuration contradicts itself, the model cannot be used, or the folder
            holds an evaluation of something else; nothing was started.
        CheckpointError: the model's folder holds no model.
        DataError: a benchmark's file cannot be used.
        typer.Exit: it did not reach its end; has its exit code.
    """
    began_s = time.monotonic()
    requested = evaluation_config(order)
    config = with_absolute_paths(requested)
    tree = settings_of(msgspec.to_builtins(config), [])
    run = ReadRun(config, tree, (), f"evaluation of {order.model}")
    config = check_before_start(run, display.console).config
    folder = Path(config.sluice.run_dir)
    asyncio.run(refuse_beside_another(folder))
    require_writable(folder, "--output")
    claim_folder(folder, requested)
    (folder / RESULTS_NAME).unlink(missing_ok=True)
    show_launcher_messages(display.console)
    end, view = asyncio.run(
        start_processes(config, folder / CONFIG_NAME, display, view=EvaluationView)
    )
    print_failures(end, display.console, view.shown)
    seconds = duration_text(time.monotonic() - began_s)
    if end.exit_code == 0 and (folder / RESULTS_NAME).is_file():
        write_report(folder)
        files = f"results: {folder / RESULTS_NAME}, page: {folder / PAGE_NAME}"
        print_line(display.console, f"evaluated in {seconds}; {files}")
        return read_results(folder)
    print_line(
        display.console,
        f"not finished, after {seconds}; the same command continues from {folder}; "
        f"logs: {folder / 'logs'}",
    )
    raise typer.Exit(end.exit_code or EXIT_INTERRUPTED)


def default_output(model: Path) -> Path:
    """Return the folder of a model's evaluation, where the user names none."""
    parts = [part for part in model.absolute().parts if part not in _NO_NAMES]
    start = max(len(parts) - 1, 0)
    if parts[start].startswith(_STEP) and len(parts) > _PARTS_OF_A_CHECKPOINT:
        start = len(parts) - _PARTS_OF_A_CHECKPOINT  # the run, and which of its checkpoints
    return EVALUATIONS / "-".join(parts[start:])


def evaluation_config(order: EvaluationOrder) -> RunConfig:
    """Return the configuration of an evaluation: of training it keeps nothing.

    Raises:
        ConfigError: a key or value is wrong, or the model's format needs a merge first.
        CheckpointError: the model's folder holds no model.
    """
    config = load_config(order.config, order.overrides)
    replace = msgspec.structs.replace
    policy = config.actor_rollout_ref
    rollout = policy.rollout
    sampling = rollout.val_kwargs
    num_samples = order.samples_per_prompt or sampling.n
    temperature = order.temperature
    if temperature is None:
        temperature = sampling.temperature or (_SAMPLED if num_samples > 1 else 0.0)
    data = replace(
        config.data,
        train_files=None,
        val_files=[str(file) for file in order.benchmarks.values()],
        train_batch_size=1,
        val_max_samples=-1,
        validation_shuffle=False,
    )
    return replace(
        config,
        data=data,
        actor_rollout_ref=replace(
            policy,
            model=replace(
                policy.model,
                path=str(_model_folder(order.model)),
                lora_rank=0,
                lora_adapter_path=None,
            ),
            actor=ActorConfig(ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1),
            rollout=replace(
                rollout,
                name=order.engine or rollout.name,
                n=1,
                val_kwargs=replace(sampling, n=num_samples, temperature=temperature),
            ),
        ),
        critic=CriticConfig(),
        algorithm=AlgorithmConfig(),
        trainer=TrainerConfig(
            total_training_steps=1, device="cpu", test_freq=-1, save_freq=-1, logger=["jsonl"]
        ),
        sluice=_services(config.sluice, order),
    )


def _services(service: ServiceConfig, order: EvaluationOrder) -> ServiceConfig:
    replace = msgspec.structs.replace
    return replace(
        service,
        run_dir=str(order.output),
        evaluation=replace(service.evaluation, benchmarks=list(order.benchmarks)),
        asynchrony=AsynchronyConfig(max_staleness=0),
        sampling=SamplingConfig(),
        sources={},
        guards=GuardsConfig(),
        dashboard=replace(service.dashboard, port=None),
        weights=WeightsConfig(),
        trainer=TrainerServiceConfig(
            replica_wait_timeout_s=service.trainer.replica_wait_timeout_s,
            batch_timeout_s=service.trainer.batch_timeout_s,
        ),
        rollout=replace(
            service.rollout,
            replicas=order.replicas or service.rollout.replicas,
            endpoint=_free_ports(service.rollout.endpoint),
            serves_model_files=True,
        ),
        reward=replace(
            service.reward,
            endpoint=_free_ports(service.reward.endpoint),
            ledger="memory",
            group_log=False,
        ),
    )


def _free_ports(endpoint: EndpointConfig) -> EndpointConfig:
    """Return the endpoint with ports of its own: the configuration may be that of a live run."""
    return msgspec.structs.replace(
        endpoint,
        port=0,
        advertise=None,
        health_port=0,
        metrics_port=None if endpoint.metrics_port is None else 0,
    )


def _model_folder(model: Path) -> Path:
    """Return the Hugging Face folder of a model or checkpoint."""
    if (model / "config.json").is_file() or not model.is_dir():
        return model  # what is wrong with it is reported with all else
    from sluice.checkpoint.source import CheckpointFormat, find_source  # loads torch

    source = find_source(model)
    if source.format is not CheckpointFormat.HUGGING_FACE:
        raise ConfigError(
            f"--model {model}: its weights are in the format {source.format}; make a Hugging Face "
            f"model of it first: sluice merge {model} OUTPUT"
        )
    return source.huggingface
