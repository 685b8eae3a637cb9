"""The report of `sluice config check`: problems, notes, derived numbers, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msgspec import UNSET

from sluice.config.catalogue.table import KeyStatus
from sluice.config.derived import (
    advantage_estimator,
    is_bypassed,
    is_corrected,
    total_training_steps,
    uses_critic,
)
from sluice.config.explain import key_statuses, notices
from sluice.config.loading.loader import KeySettings
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.loading.yaml_text import flat_tree
from sluice.config.memory.rollout import (
    GIB,
    RolloutMemory,
    fits,
    rollout_layout,
    rollout_memory,
    smallest_tensor_parallel,
)
from sluice.config.memory.shape import ModelShape
from sluice.config.problems import Problem, Severity
from sluice.config.rules.checks import all_problems
from sluice.config.rules.sampling import strategy_notes, truncation_notes
from sluice.config.run import RunConfig, defaults
from sluice.config.sources import source_configs
from sluice.config.verl_sizes import (
    ACTOR,
    ROLLOUT,
    BatchPlan,
    LogProbPass,
    ParallelSplit,
    own_batch,
    quotient,
    verl_batch,
    verl_sizes,
)


def launch_notes(config: RunConfig, as_set: SettingsTree) -> list[Problem]:
    """Return the notes for the start of a run; `as_set` holds the keys that were set."""
    return [*notices(as_set), *_idle_critic_notes(config, as_set), *remarks(config)]


def remarks(config: RunConfig) -> list[Problem]:
    """Return notes on the joint effects of settings."""
    return [
        *_divergence_notes(config),
        *_correction_notes(config),
        *_lone_response_notes(config),
        *strategy_notes(config),
        *truncation_notes(config),
    ]


def _note(key: str, value: object, message: str) -> Problem:
    return Problem(key, value, message, severity=Severity.NOTE)


def _divergence_notes(config: RunConfig) -> Iterator[Problem]:
    in_reward = config.algorithm.use_kl_in_reward
    in_loss = config.actor_rollout_ref.actor.use_kl_loss
    if in_reward and in_loss:
        yield _note(
            "algorithm.use_kl_in_reward",
            True,
            f"with {ACTOR}.use_kl_loss = true: the divergence from the reference model counts "
            "twice, in the reward and in the loss",
        )


def _correction_notes(config: RunConfig) -> Iterator[Problem]:
    # The user may not have chosen the correction: see `loading.conversions`.
    staleness, correction = (
        config.sluice.asynchrony.max_staleness,
        config.algorithm.rollout_correction,
    )
    if not staleness or not is_corrected(config):
        return
    means = f"the behavior logprobs in place of the old ones ({ACTOR}.use_rollout_log_probs)"
    if is_bypassed(config):
        means = "the ratios to the behavior policy (bypass mode)"
    if correction.rollout_is is not None:
        means = (
            f"truncated importance weights (algorithm.rollout_correction.rollout_is = "
            f"{correction.rollout_is}, threshold {correction.rollout_is_threshold})"
        )
    versions = f"{staleness} policy version{'' if staleness == 1 else 's'}"
    yield _note(
        "",
        UNSET,
        f"samples may lag by at most {versions}; {means} correct for it",
    )


def _idle_critic_notes(config: RunConfig, as_set: SettingsTree) -> Iterator[Problem]:
    if uses_critic(config):
        return
    critic = flat_tree({"critic": defaults()["critic"]})
    keys = {key: value for key, value in as_set.by_key().items() if key in critic}
    changed = [key for key, value in keys.items() if value not in (None, critic[key])]
    if changed and changed != ["critic.enable"]:
        suffix = f", as {len(changed) - 1} more of critic.*" if changed[1:] else ""
        yield _note(
            changed[0],
            keys[changed[0]],
            f"has no effect{suffix}: algorithm.adv_estimator = {config.algorithm.adv_estimator} "
            "trains no critic",
        )


def _lone_response_notes(config: RunConfig) -> Iterator[Problem]:
    for name, source in source_configs(config).items():
        estimator = advantage_estimator(source)
        keeps_lone = "group_index" in estimator.needs and not estimator.needs_others
        if source.actor_rollout_ref.rollout.n == 1 and keeps_lone:
            yield _note(
                f"sluice.sources.{name}.n" if name else f"{ROLLOUT}.n",
                1,
                f"with algorithm.adv_estimator = {source.algorithm.adv_estimator}: a group of one "
                "has nothing to compare with, so its advantage is its raw reward, as in verl",
            )


@dataclass(frozen=True, slots=True)
class DerivedNumber:
    """A derived number, in verl and here; `None` if it is not whole or not fixed."""

    name: str
    formula: str
    as_verl: int | None
    here: int | None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Estimates for each device of an engine.

    Attributes:
        smallest_tp: smallest tensor parallel size by the rule of Ascend's practice guide;
            `None` without `device_bytes`, or if no size suffices.
    """

    parameters: int
    active_parameters: int
    device_bytes: float | None
    rollout: RolloutMemory
    tp: int
    smallest_tp: int | None


def engine_report(config: RunConfig, shape: ModelShape, device_gib: float | None) -> EngineReport:
    """Estimate the memory of each device."""
    engine = rollout_layout(config)
    device = None if device_gib is None else device_gib * GIB
    smallest = None
    if device is not None:
        smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    return EngineReport(
        parameters=shape.total_parameters,
        active_parameters=shape.active_parameters,
        device_bytes=device,
        rollout=rollout_memory(shape, engine, device),
        tp=engine.tp,
        smallest_tp=smallest,
    )


def engine_problems(config: RunConfig, shape: ModelShape, device_gib: float) -> Iterator[Problem]:
    """Yield a problem if an engine's share of devices of `device_gib` GiB cannot hold the
    weights."""
    engine, device = rollout_layout(config), device_gib * GIB
    if fits(shape, engine, device):
        return
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    message = (
        f": {device_gib:g} GiB * {ROLLOUT}.gpu_memory_utilization {engine.utilization:g} * "
        f"{engine.tp} cannot hold {shape.total_parameters:,} parameters of 2 bytes"
    )
    smallest = smallest_tensor_parallel(shape, device, engine.utilization)
    problem = Problem(key, engine.tp, message, rule="engine-memory")
    if smallest is None:
        message = f"{message}, and neither can any size that divides {shape.heads} heads"
        yield replace(problem, message=message, remedy="use larger devices")
    else:
        yield replace(problem, overrides=(f"{key}={smallest}",))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything that `sluice config check` finds about one configuration.

    Attributes:
        problems: all broken rules.
        notes: settings that are mapped or have no effect, and joint effects of settings.
        keys: the treatment of every key that was set, by its spelling as written.
        quantities: the numbers that follow from the batch sizes.
        learning_rate: the actor's peak learning rate.
        engine: the engine's memory; `None` if the model's shape is unknown.
    """

    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    keys: dict[str, KeyStatus]
    quantities: tuple[DerivedNumber, ...]
    learning_rate: float
    engine: EngineReport | None


def check_report(
    config: RunConfig,
    as_set: SettingsTree,
    *,
    shape: ModelShape | None = None,
    device_gib: float | None = None,
    dataset_rows: int | None = None,
    files: bool = True,
    host_config: RunConfig | None = None,
) -> CheckReport:
    """Apply every rule and derive every number.

    Args:
        as_set: the keys as the user set them.
        shape: the trained model's shape, if known.
        device_gib: memory of one device, GiB, if known.
        dataset_rows: rows of data.train_files, if countable.
        files: whether the paths that the configuration names must exist.
        host_config: the configuration as this host would run it, on its devices; `None`:
            `config`.
    """
    settings = KeySettings(config, as_set.by_key())
    problems = all_problems(config, settings, shape=shape, files=files)
    if shape is not None and device_gib is not None:
        problems += engine_problems(config, shape, device_gib)
    return CheckReport(
        problems=tuple(problems),
        notes=tuple(launch_notes(config, as_set)),
        keys=key_statuses(as_set),
        quantities=tuple(_quantities(config, settings, dataset_rows, host_config or config)),
        learning_rate=config.actor_rollout_ref.actor.optim.lr,
        engine=None if shape is None else engine_report(config, shape, device_gib),
    )


def _quantities(
    config: RunConfig, settings: KeySettings, dataset_rows: int | None, host_config: RunConfig
) -> list[DerivedNumber]:
    verl, ours = verl_batch(config, settings), own_batch(host_config)
    fixed = not config.actor_rollout_ref.actor.use_dynamic_bsz
    formulas: list[tuple[str, str, Callable[[BatchPlan], int | None]]] = [
        ("trainer ranks", "nnodes * n_gpus_per_node", lambda b: b.split.world),
        (
            "data-parallel size D",
            _data_parallel_formula(verl.split, ours.split),
            lambda b: b.split.data_parallel,
        ),
        ("responses per step", "train_batch_size * n", lambda b: b.rows),
        ("responses per rank", "train_batch_size * n / D", lambda b: b.rows_per_data_rank),
        ("mini-batch responses", "ppo_mini_batch_size * n", lambda b: b.mini_rows),
        (
            "normalised mini-batch",
            "ppo_mini_batch_size * n / D",
            lambda b: b.mini_rows_per_data_rank,
        ),
        (
            "accumulation steps",
            "normalised mini-batch / ppo_micro_batch_size_per_gpu" if fixed else "by token budget",
            lambda b: b.accumulation_steps,
        ),
        (
            "optimizer steps per train batch",
            "train_batch_size / ppo_mini_batch_size * ppo_epochs",
            lambda b: b.optimizer_steps,
        ),
    ]
    result = [
        DerivedNumber(name, formula, number_of(verl), number_of(ours))
        for name, formula, number_of in formulas
    ]
    rounds = "gen_batch_size * n; here: groups are issued one by one"
    result.append(DerivedNumber("responses per generation round", rounds, verl.gen_rows, None))
    result += [
        _log_prob_quantity(log_probs, verl, ours)
        for log_probs in verl_sizes(config, settings).log_prob_passes
    ]
    configured = config.trainer.total_training_steps
    if configured is not None or dataset_rows is not None:
        total = total_training_steps(config, dataset_rows or 0)
        formula, as_verl = "total_training_steps", total
        if configured is None:
            formula = "rows * total_epochs / train_batch_size; verl drops the rest of each epoch"
            as_verl = verl.steps_per_epoch(dataset_rows or 0) * config.trainer.total_epochs
        result.append(DerivedNumber("steps of the run", formula, as_verl, total))
    if dataset_rows is not None:
        steps, own_steps = verl.steps_per_epoch(dataset_rows), dataset_rows // ours.train_prompts
        formula = f"{dataset_rows} rows / gen_batch_size (here: train_batch_size)"
        result.append(DerivedNumber("steps per epoch, nothing filtered", formula, steps, own_steps))
    return result


def _log_prob_quantity(log_probs: LogProbPass, verl: BatchPlan, ours: BatchPlan) -> DerivedNumber:
    policy = "old-policy" if log_probs.section == ROLLOUT else "reference"
    name = f"{policy} logprob micro-batches"
    our_number = quotient(ours.rows_per_data_rank, ours.micro_rows)
    if log_probs.dynamic:
        return DerivedNumber(name, "by token budget", None, our_number)
    return DerivedNumber(
        name,
        "responses per rank / log_prob_micro_batch_size_per_gpu (here: / the update's)",
        quotient(verl.rows_per_data_rank, log_probs.micro_rows),
        our_number,
    )


def _data_parallel_formula(verl: ParallelSplit, ours: ParallelSplit) -> str:
    our_formula = f"ranks / (TP {ours.tp} * PP {ours.pp} * sp {ours.sp})"
    if verl.megatron:
        return f"ranks / (TP {verl.tp} * PP {verl.pp} * CP {verl.cp}); here: {our_formula}"
    return our_formula if ours.tp * ours.pp > 1 else f"ranks / sp {verl.sp}"
