"""What the quickstart's files are made with; readable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """The supervised warm start: AdamW, linear warm-up, plateau, linear decay to zero.

    `decay_share` is the share of all steps over which the learning rate decays;
    `wrong_step_rate` is the share of wrong steps in the worked answers that are imitated.
    """

    num_steps: int = 400
    batch_dialogues: int = 32
    learning_rate: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup_steps: int = 20
    decay_share: float = 0.7
    wrong_step_rate: float = 0.25

    @property
    def num_dialogues(self) -> int:
        """Dialogues in all: each is seen once."""
        return self.num_steps * self.batch_dialogues


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """Sizes of everything `prepare` makes."""

    num_train: int = 8_000
    num_held_out: int = 256
    num_tokenizer_dialogues: int = 2_000
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
