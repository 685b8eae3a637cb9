"""Read a configuration as verl does: batch and parallel sizes, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.config.derived import uses_critic, uses_reference
from sluice.config.loading.loader import KeySettings
from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.config.sources import largest_n, responses_per_step


@dataclass(frozen=True, slots=True)
class ParallelSplit:
    """How trainer ranks are divided. `megatron` decides which of sp and cp shares sequences.

    Args:
        nodes: machines of the trainer.
        ranks_per_node: trainer ranks on each.
        sp: Ulysses sequence parallel size (FSDP).
    """

    nodes: int
    ranks_per_node: int
    megatron: bool = False
    sp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def world(self) -> int:
        """Trainer ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows: TP·PP·CP, or TP·PP·sp (in verl's FSDP TP = PP = 1)."""
        return self.tp * self.pp * (self.cp if self.megatron else self.sp)

    @property
    def data_parallel(self) -> int | None:
        """D: groups of ranks that train different rows, each a data-parallel rank."""
        return quotient(self.world, self.ranks_per_row)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch sizes of one run.

    Args:
        train_prompts: prompts of a train batch (data.train_batch_size).
        mini_prompts: prompts of a mini-batch (ppo_mini_batch_size).
        responses: responses of a prompt (rollout.n).
        epochs: passes over a train batch (ppo_epochs).
        gen_prompts: prompts of one generation round (data.gen_batch_size).
        micro_rows: rows of a micro-batch on one data-parallel rank; `None` with a token budget.
        split: the trainer's ranks.
        train_rows: responses of a train batch of several sources; `None`: P·n.
    """

    train_prompts: int
    mini_prompts: int
    responses: int
    epochs: int
    gen_prompts: int
    micro_rows: int | None
    split: ParallelSplit
    train_rows: int | None = None

    @property
    def rows(self) -> int:
        """Responses of a train batch: P·n, or those of all sources."""
        return self.train_rows or self.train_prompts * self.responses

    @property
    def rows_per_data_rank(self) -> int | None:
        """Rows of a train batch on one data-parallel rank: P·n / D."""
        return quotient(self.rows, self.split.data_parallel)

    @property
    def mini_rows(self) -> int:
        """Rows of a mini-batch over all ranks: M·n."""
        return self.rows * self.mini_prompts // self.train_prompts

    @property
    def mini_rows_per_data_rank(self) -> int | None:
        """The normalised mini-batch: M·n / D."""
        return quotient(self.mini_rows, self.split.data_parallel)

    @property
    def fitting_micro(self) -> int:
        """Rows that divide the normalised mini-batch; few, as the memory is unknown."""
        return largest_divisor(self.mini_rows_per_data_rank or 1, 4)

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches of a mini-batch: (M·n / D) / b; `None` with a token budget too."""
        return quotient(self.mini_rows_per_data_rank, self.micro_rows)

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps from a train batch: (P / M)·epochs."""
        mini_batches = quotient(self.train_prompts, self.mini_prompts)
        return None if mini_batches is None else mini_batches * self.epochs

    @property
    def gen_rows(self) -> int:
        """Responses of one generation round."""
        return self.rows * self.gen_prompts // self.train_prompts

    def steps_per_epoch(self, dataset_rows: int) -> int:
        """Return the generation rounds in one pass over the data: steps, if nothing is filtered."""
        return dataset_rows // self.gen_prompts


def quotient(numerator: int | None, denominator: int | None) -> int | None:
    """Return numerator / denominator if both are known and it is whole."""
    if numerator is None or not denominator or numerator % denominator:
        return None
    return numerator // denominator


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is no larger than `at_most`, at least 1."""
    return next((d for d in range(min(at_most, number), 0, -1) if number % d == 0), 1)


def next_multiple(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is no smaller than `number`."""
    return math.ceil(number / step) * step


ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CRITIC = "critic"
REF = "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"
_ULYSSES = "ulysses_sequence_parallel_size"


@dataclass(frozen=True, slots=True)
class LogProbPass:
    """A forward pass for logprobs: the old policy's (`rollout`) or the reference's (`ref`).

    Args:
        section: the section whose keys govern it.
        micro_rows: log_prob_micro_batch_size_per_gpu as set.
        global_micro_rows: log_prob_micro_batch_size as set; deprecated.
        dynamic: log_prob_use_dynamic_bsz.
        token_budget: log_prob_max_token_len_per_gpu.
        sp: ranks that share a row.
    """

    section: str
    micro_rows: int | None
    global_micro_rows: int | None
    dynamic: bool
    token_budget: int
    sp: int


@dataclass(frozen=True, slots=True)
class CriticPass:
    """The critic's update.

    Args:
        dynamic: critic.use_dynamic_bsz; unset it follows the actor.
        token_budget: critic.ppo_max_token_len_per_gpu.
        sp: ranks that share a row.
        remove_padding: critic.model.use_remove_padding.
    """

    dynamic: bool
    token_budget: int
    sp: int
    remove_padding: bool


@dataclass(frozen=True, slots=True)
class VerlSizes:
    """A run as verl reads it, with the sizes that verl would normalise and check.

    Args:
        keys: as the user set them, those that only verl has included.
        log_prob_passes: the old policy's, and the reference's if the run has one.
        critic: `None` in a run without one.
    """

    config: RunConfig
    keys: KeySettings
    batch: BatchPlan
    log_prob_passes: tuple[LogProbPass, ...]
    critic: CriticPass | None

    @property
    def actor(self) -> ActorConfig:
        """The policy and its update."""
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self) -> RolloutConfig:
        """The inference engine."""
        return self.config.actor_rollout_ref.rollout


def verl_sizes(config: RunConfig, settings: KeySettings) -> VerlSizes:
    """Return a run as verl would read it."""
    sections = (ROLLOUT, REF) if uses_reference(config) else (ROLLOUT,)
    return VerlSizes(
        config,
        settings,
        verl_batch(config, settings),
        tuple(_log_prob_pass(config, settings, section) for section in sections),
        _critic_pass(config, settings) if uses_critic(config) else None,
    )


def verl_batch(config: RunConfig, settings: KeySettings) -> BatchPlan:
    """Return the batch sizes with verl's data-parallel size."""
    return _batch_plan(config, parallel_split(config, settings))


def own_batch(config: RunConfig) -> BatchPlan:
    """Return the batch sizes with sluice's data-parallel size."""
    sizes = config.actor_rollout_ref.actor.fsdp_config
    split = ParallelSplit(
        config.trainer.nnodes,
        config.trainer.n_gpus_per_node,
        sp=sizes.ulysses_sequence_parallel_size,
        tp=sizes.tensor_parallel_size,
        pp=sizes.pipeline_parallel_size,
    )
    return _batch_plan(config, split)


def parallel_split(config: RunConfig, settings: KeySettings) -> ParallelSplit:
    """Return the trainer's parallel sizes, of FSDP or of Megatron."""
    megatron, sharding = is_megatron(settings), config.actor_rollout_ref.actor.fsdp_config
    return ParallelSplit(
        nodes=config.trainer.nnodes,
        ranks_per_node=config.trainer.n_gpus_per_node,
        megatron=megatron,
        sp=settings.integer(f"{ACTOR}.fsdp_config.{_ULYSSES}"),
        tp=_megatron_size(settings, "tensor") if megatron else sharding.tensor_parallel_size,
        pp=_megatron_size(settings, "pipeline") if megatron else sharding.pipeline_parallel_size,
        cp=settings.integer(f"{MEGATRON}.context_parallel_size"),
    )


def is_megatron(settings: KeySettings) -> bool:
    """Return whether Megatron trains.

    In verl the name of the base configuration decides too, but a list of overrides lacks it; so
    without a strategy a size that cuts Megatron's model decides.
    """
    strategy = settings.value(f"{ACTOR}.strategy")
    if strategy is not None and settings.is_set(f"{ACTOR}.strategy"):
        return strategy == "megatron"
    cuts = [_megatron_size(settings, "tensor"), _megatron_size(settings, "pipeline")]
    return max(cuts) > 1


def expert_tensor_parallel(settings: KeySettings) -> int:
    """Return the ranks that share one expert; by default as many as share a dense layer."""
    key = f"{MEGATRON}.expert_tensor_parallel_size"
    return settings.integer_or_none(key) or _megatron_size(settings, "tensor")


def _megatron_size(settings: KeySettings, kind: str) -> int:
    return settings.integer(f"{MEGATRON}.{kind}_model_parallel_size")


def _batch_plan(config: RunConfig, split: ParallelSplit) -> BatchPlan:
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    return BatchPlan(
        train_prompts=prompts,
        mini_prompts=actor.ppo_mini_batch_size,
        responses=largest_n(config),
        epochs=actor.ppo_epochs,
        gen_prompts=config.data.gen_batch_size or prompts,
        micro_rows=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        split=split,
        train_rows=responses_per_step(config) if config.sluice.sources else None,
    )


def _log_prob_pass(config: RunConfig, settings: KeySettings, section: str) -> LogProbPass:
    actor, size_key = config.actor_rollout_ref.actor, f"{section}.log_prob_micro_batch_size"
    split = parallel_split(config, settings)
    shared = split.cp if split.megatron else split.sp
    sp_key, flag_key = f"{REF}.fsdp_config.{_ULYSSES}", f"{section}.log_prob_use_dynamic_bsz"
    if section == REF and not split.megatron and settings.is_set(sp_key):
        shared = settings.integer(sp_key)
    return LogProbPass(
        section,
        micro_rows=rows_per_device(settings, size_key),
        global_micro_rows=settings.integer_or_none(size_key),
        dynamic=settings.flag(flag_key) if settings.is_set(flag_key) else actor.use_dynamic_bsz,
        token_budget=settings.integer_or_none(f"{section}.log_prob_max_token_len_per_gpu")
        or actor.ppo_max_token_len_per_gpu,
        sp=shared,
    )


def _critic_pass(config: RunConfig, settings: KeySettings) -> CriticPass:
    critic, dynamic = config.critic, config.critic.use_dynamic_bsz
    sp_key = "megatron.context_parallel_size" if is_megatron(settings) else f"fsdp.{_ULYSSES}"
    return CriticPass(
        dynamic=config.actor_rollout_ref.actor.use_dynamic_bsz if dynamic is None else dynamic,
        token_budget=critic.ppo_max_token_len_per_gpu,
        sp=settings.integer(f"{CRITIC}.{sp_key}"),
        remove_padding=settings.flag(f"{CRITIC}.model.use_remove_padding"),
    )


def rows_per_device(settings: KeySettings, key: str) -> int | None:
    """Return the rows per device, unless they only follow from the deprecated `key`."""
    per_device = f"{key}_per_gpu"
    if settings.is_set(key) and not settings.is_set(per_device):
        return None
    return settings.integer_or_none(per_device)
