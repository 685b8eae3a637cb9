"""The strategies of over-generation, and the settings of a run that they use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

OnPolicyFill = Literal["exact", "expected"]
"""What starts at S = 0: groups that a batch surely needs, or is expected to need."""

_ROUNDING = 1e-9  # 0.28 of 100 are 28 groups


class StrategyName(StrEnum):
    """How prompts are started until a batch of mixed groups is full.

    ``rounds`` is verl's way: waves of prompts, each awaited whole, the surplus thrown away.
    ``stream`` refills continuously and carries surplus over. ``staged`` generates a few samples
    of a group first. ``memory`` skips prompts whose earlier attempts promise nothing.
    ``staged_memory`` does both.
    """

    ROUNDS = "rounds"
    STREAM = "stream"
    STAGED = "staged"
    MEMORY = "memory"
    STAGED_MEMORY = "staged_memory"

    @property
    def uses_probes(self) -> bool:
        """Whether a group's first samples decide about the rest."""
        return self in (StrategyName.STAGED, StrategyName.STAGED_MEMORY)

    @property
    def uses_memory(self) -> bool:
        """Whether earlier attempts of a prompt decide about this one."""
        return self in (StrategyName.MEMORY, StrategyName.STAGED_MEMORY)


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What a strategy is made of, from the keys that `sampling_rules` reads.

    Args:
        train_batch_size: B, groups in a train batch.
        max_staleness: S, versions a group may be behind when it is trained; 0 for ``rounds``.
        samples_per_group: n, samples of a prompt.
        gen_batch_size: prompts of a wave; ``rounds`` only.
        max_num_gen_batches: waves after which an unfilled batch is an error, 0 or less for
            unlimited; ``rounds`` only.
        ahead_share: of the ``S * B`` groups that may be kept beyond a batch, those that are wanted;
            above 0 and at most 1.
    """

    strategy: StrategyName
    train_batch_size: int
    max_staleness: int
    samples_per_group: int
    gen_batch_size: int = 0
    max_num_gen_batches: int = 0
    probe_samples: int = 4
    exploration: float = 0.1
    coverage_guard: bool = True
    seed: int = 0
    paces: bool = True
    ahead_share: float = 1.0
    on_policy_fill: OnPolicyFill = "exact"

    @property
    def num_ahead(self) -> int | None:
        """Groups wanted beyond a batch, at least 1; ``None``: as many as have a slot in time."""
        if self.ahead_share == 1.0 or self.max_staleness == 0:
            return None
        num_wanted = self.ahead_share * self.max_staleness * self.train_batch_size
        return math.ceil(num_wanted - _ROUNDING)

    @property
    def preempts(self) -> bool:
        """Whether a full batch preempts what still runs, to be generated again."""
        carries_over = self.strategy is not StrategyName.ROUNDS
        return carries_over and self.max_staleness == 0 and self.on_policy_fill == "expected"
