"""The report of `sluice config check`: broken rules, remarks, derived numbers, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sluice.config.derived import is_bypassed, is_corrected
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.fit import memory_violations
from sluice.config.memory.report import MemoryReport, memory_report
from sluice.config.memory.shape import ModelShape
from sluice.config.problems import Violation
from sluice.config.rules.checks import violations
from sluice.config.rules.sampling import strategy_remark
from sluice.config.run import RunConfig
from sluice.config.verl_run import (
    ACTOR,
    ROLLOUT,
    BatchPlan,
    LogProbPass,
    own_batch,
    quotient,
    verl_batch,
    verl_run,
)

_KEEPS_LONE_REWARDS = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "gdpo",
        "rloo",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
)


def remarks(config: RunConfig) -> list[str]:
    """Sentences without a full stop, for the console at the start."""
    strategy = strategy_remark(config)
    found = [
        *_divergence(config),
        *_adpo(config),
        *_correction(config),
        *_lone_responses(config),
    ]
    return [*found, strategy] if strategy else found


def _divergence(config: RunConfig) -> Iterator[str]:
    in_reward = config.algorithm.use_kl_in_reward
    in_loss = config.actor_rollout_ref.actor.use_kl_loss
    if in_reward and in_loss:
        yield (
            "the divergence from the reference model counts twice, in the reward "
            f"(algorithm.use_kl_in_reward) and in the loss ({ACTOR}.use_kl_loss)"
        )
    if in_reward or in_loss:
        yield (
            "a reference model is kept: every trainer rank holds its weights in host memory, and "
            "on its device during one more forward pass of every row"
        )


def _adpo(config: RunConfig) -> Iterator[str]:
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "adpo":
        yield (
            f"algorithm.adv_estimator and {ACTOR}.policy_loss.loss_mode are both adpo: each sets "
            "the other where that is left out"
        )


def _correction(config: RunConfig) -> Iterator[str]:
    """Told because it may have been chosen (`conversions`)."""
    staleness, correction = (
        config.sluice.asynchrony.max_staleness,
        config.algorithm.rollout_correction,
    )
    if not staleness or not is_corrected(config):
        return
    means = f"the behaviour logprobs in the place of the old ones ({ACTOR}.use_rollout_log_probs)"
    if is_bypassed(config):
        means = "the ratio to the behaviour policy (bypass mode)"
    if correction.rollout_is is not None:
        means = (
            f"truncated importance weights (algorithm.rollout_correction.rollout_is = "
            f"{correction.rollout_is}, threshold {correction.rollout_is_threshold})"
        )
    yield f"samples may be {staleness} versions old; {means} correct for it"


def _lone_responses(config: RunConfig) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.n == 1 and estimator in _KEEPS_LONE_REWARDS:
        yield (
            f"{ROLLOUT}.n = 1 with algorithm.adv_estimator = {estimator}: a group of one has "
            "nothing to be compared with, so advantages are made of the raw rewards, as in verl"
        )


@dataclass(frozen=True, slots=True)
class Quantity:
    """A derived number, as verl would have it and here; `None`: not whole, or not fixed."""

    name: str
    formula: str
    as_verl: int | None
    here: int | None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings about one configuration.

    Args:
        violations: all broken rules.
        quantities: the numbers that follow from the batch sizes.
        memory: `None` where the model's shape is not known.
    """

    violations: tuple[Violation, ...]
    quantities: tuple[Quantity, ...]
    memory: MemoryReport | None

    @property
    def remedies(self) -> tuple[str, ...]:
        """Overrides of all broken rules, each key once."""
        found = [text for broken in self.violations for text in broken.remedy]
        return tuple(dict.fromkeys(found))


def check_report(
    config: RunConfig,
    settings: KeySettings,
    *,
    shape: ModelShape | None = None,
    device_gib: float | None = None,
    dataset_rows: int | None = None,
    files: bool = True,
) -> CheckReport:
    """Applies every rule and derives every number.

    Args:
        settings: the keys as the user set them.
        shape: the trained model's, where it is known.
        device_gib: memory of one device, GiB, where it is known.
        dataset_rows: rows of data.train_files, where they can be counted.
        files: whether what the configuration names must be there.
    """
    broken = violations(config, settings, shape=shape, files=files)
    if shape is not None and device_gib is not None:
        broken += memory_violations(config, settings, shape, device_gib)
    memory = None if shape is None else memory_report(config, settings, shape, device_gib)
    return CheckReport(tuple(broken), tuple(_quantities(config, settings, dataset_rows)), memory)


def _quantities(
    config: RunConfig, settings: KeySettings, dataset_rows: int | None
) -> list[Quantity]:
    verl, own = verl_batch(config, settings), own_batch(config, settings)
    fixed = not config.actor_rollout_ref.actor.use_dynamic_bsz
    formulas: list[tuple[str, str, Callable[[BatchPlan], int | None]]] = [
        ("trainer ranks", "nnodes * n_gpus_per_node", lambda b: b.split.world),
        ("data-parallel size D", _data_parallel_formula(verl), lambda b: b.split.data_parallel),
        ("responses per step", "train_batch_size * n", lambda b: b.rows),
        ("responses per rank", "train_batch_size * n / D", lambda b: b.rows_per_replica),
        ("mini-batch responses", "ppo_mini_batch_size * n", lambda b: b.mini_rows),
        (
            "normalised mini-batch",
            "ppo_mini_batch_size * n / D",
            lambda b: b.mini_rows_per_replica,
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
    result = [Quantity(name, formula, of(verl), of(own)) for name, formula, of in formulas]
    rounds = "gen_batch_size * n; here: groups are issued one by one"
    result.append(Quantity("responses per generation round", rounds, verl.gen_rows, None))
    result += [
        _log_prob_quantity(one, verl, own) for one in verl_run(config, settings).log_prob_passes
    ]
    if dataset_rows is not None:
        steps, own_steps = verl.steps_per_epoch(dataset_rows), dataset_rows // own.train_prompts
        formula = f"{dataset_rows} rows / gen_batch_size (here: train_batch_size)"
        result.append(Quantity("steps per epoch, nothing filtered", formula, steps, own_steps))
    return result


def _log_prob_quantity(one: LogProbPass, verl: BatchPlan, own: BatchPlan) -> Quantity:
    policy = "old-policy" if one.section == ROLLOUT else "reference"
    name = f"{policy} logprob micro-batches"
    here = quotient(own.rows_per_replica, own.micro_rows)
    if one.dynamic:
        return Quantity(name, "by token budget", None, here)
    return Quantity(
        name,
        "responses per rank / log_prob_micro_batch_size_per_gpu (here: / the update's)",
        quotient(verl.rows_per_replica, one.micro_rows),
        here,
    )


def _data_parallel_formula(batch: BatchPlan) -> str:
    split = batch.split
    if split.megatron:
        return f"ranks / (TP {split.tp} * PP {split.pp} * CP {split.cp}); here: ranks"
    return f"ranks / sp {split.sp}; here: ranks"
