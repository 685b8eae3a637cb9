"""How the trainer's ranks divide its work: copies of the model, shards, sequences, experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from sluice.config.run import RunConfig
from sluice.errors import ConfigError

_FSDP = "actor_rollout_ref.actor.fsdp_config"
SHARD_KEY = f"{_FSDP}.fsdp_size"
SEQUENCE_KEY = f"{_FSDP}.ulysses_sequence_parallel_size"
EXPERT_KEY = f"{_FSDP}.expert_parallel_size"
_RANKS = "trainer ranks (trainer.nnodes * trainer.n_gpus_per_node)"

Division: TypeAlias = tuple[str, int, int, str]
"""A key, its size, the number that it must divide, and what that is a number of."""


def divisions(ranks: int, shard: int, sequence: int, experts: int) -> Iterator[Division]:
    """Yield what each size of a layout must divide."""
    yield SHARD_KEY, shard, ranks, _RANKS
    yield SEQUENCE_KEY, sequence, ranks, _RANKS
    yield EXPERT_KEY, experts, shard, f"ranks that share one copy of the model ({SHARD_KEY})"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of the trainer's groups of ranks. Neighboring ranks form a group.

    Args:
        ranks: trainer ranks.
        shard: ranks that share one copy of weights, gradients and optimizer state (FSDP2); there
            are several copies if it is below `ranks` (HSDP).
        sequence: ranks that share each packed sequence (Ulysses).
        experts: ranks over which the experts of a layer are divided, the innermost of a copy's;
            each expert is sharded over the rest of the copy.

    Raises:
        ConfigError: a size does not divide; names the numbers and the nearest sizes that do.
    """

    ranks: int
    shard: int = 1
    sequence: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for key, size, number, things in divisions(
            self.ranks, self.shard, self.sequence, self.experts
        ):
            _check_divides(key, size, number, things)

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that train different rows."""
        return self.ranks // self.sequence


def trainer_layout(config: RunConfig, ranks: int) -> ParallelLayout:
    """Return the layout that the policy's keys ask for.

    Args:
        config: loading has put verl's spellings for Megatron and VeOmni into `fsdp_config`.
        ranks: trainer ranks.

    Raises:
        ConfigError: a size does not divide; names key, value and the nearest that do.
    """
    sharding = config.actor_rollout_ref.actor.fsdp_config
    return ParallelLayout(
        ranks,
        shard_size(sharding.fsdp_size, ranks, SHARD_KEY),
        sharding.ulysses_sequence_parallel_size,
        sharding.expert_parallel_size,
    )


def shard_size(fsdp_size: int, ranks: int, key: str) -> int:
    """Return how many ranks share one copy of a model: all for a size below 1 or too large.

    Args:
        key: of `fsdp_size`, for the error.

    Raises:
        ConfigError: the size does not divide the number of ranks.
    """
    if not 0 < fsdp_size < ranks:
        return ranks
    _check_divides(key, fsdp_size, ranks, _RANKS)
    return fsdp_size


def shares_heads(ranks: int, heads: int, kv_heads: int) -> bool:
    """Return whether ranks can share attention heads evenly: few key-value heads are repeated."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def sequence_sizes(heads: int, kv_heads: int) -> list[int]:
    """Return how many ranks can share a sequence of a model with so many heads."""
    return [size for size in range(1, heads + 1) if shares_heads(size, heads, kv_heads)]


def check_experts(experts: int, num_experts: int, family: str) -> None:
    """Refuse ranks that cannot divide a model's experts evenly.

    Args:
        experts: ranks that divide them.
        num_experts: of one layer; 0 for a dense model.
        family: the model's name for itself, for the error.

    Raises:
        ConfigError: names the numbers and the nearest that divide.
    """
    if experts > 1 and num_experts == 0:
        raise ConfigError(
            f"{EXPERT_KEY}={experts}: a {family} model has no experts; leave the key at 1"
        )
    _check_divides(EXPERT_KEY, experts, num_experts, f"experts of a layer of the {family} model")


def nearest_divisors(wanted: int, number: int) -> str:
    """Return the divisors of `number` next to `wanted`, as words: ``4 or 8``."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = [size for size in divisors if size <= wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    return " or ".join(map(str, below + above))


def _check_divides(key: str, size: int, number: int, things: str) -> None:
    if size > 1 and number % size:
        raise ConfigError(
            f"{key}={size} does not divide the {number} {things}; "
            f"give {nearest_divisors(size, number)}"
        )
