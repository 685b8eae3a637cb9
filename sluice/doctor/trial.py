"""What checks ask the code of services (`sluice.concurrency.answers`), and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from sluice.config.schema.reward import RewardConfig
from sluice.config.schema.service import SandboxConfig
from sluice.data.scoring import ScorerInput


class PromptsToMeasure(msgspec.Struct, frozen=True):
    """What `services.rollout.prompt_check` reads; it writes a number or a text for each prompt.

    Attributes:
        model: its folder.
        template_kwargs: of the chat template.
        trust_remote_code: run the tokenizer's own code.
        prompts: (role, content) of each message.
    """

    model: str
    template_kwargs: Mapping[str, object]
    trust_remote_code: bool
    prompts: Sequence[Sequence[tuple[str, str]]]


class ScorerTrial(msgspec.Struct, frozen=True):
    """What `services.reward.scorer_check` reads: the configured grading, and what to try it on.

    Without rows it is only loaded. A row after `enough_s` is not graded any more.
    """

    reward: RewardConfig
    sandbox: SandboxConfig = SandboxConfig()
    rows: list[ScorerInput] = []
    enough_s: float = math.inf


class TrialAnswer(msgspec.Struct, frozen=True):
    """The outcome of a row, as `services.reward.scorer_check` writes it: what the scorer gave, or
    why there is none, with the last frames."""

    score: float | None = None
    metrics: Mapping[str, float] = {}
    prediction: str | None = None
    failure: str = ""
    frames: tuple[str, ...] = ()
