"""The coefficient of the KL penalty in the reward (`algorithm.kl_ctrl`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sluice.errors import ConfigError

MAX_PROPORTIONAL_ERROR = 0.2
CONTROLLER_TYPES = ("fixed", "adaptive")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """A state; `after_batch` gives the next one.

    ``fixed`` keeps `coef`. ``adaptive`` moves it towards `target_kl` (Ziegler et al. 2019, arXiv
    1909.08593, §2.2): ``coef * (1 + clip(kl / target_kl - 1, -0.2, 0.2) * rows / horizon)``.

    Args:
        type: ``fixed`` or ``adaptive``.
        coef: coefficient of the penalty in the next batch.
        target_kl: divergence a token to be reached, > 0.
        horizon: rows over which a clipped error of 1 would double the coefficient, > 0.

    Raises:
        ConfigError: unknown type, or a bound of the adaptive controller is broken.
    """

    type: str = "fixed"
    coef: float = 0.001
    target_kl: float = 0.1
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if self.type not in CONTROLLER_TYPES:
            raise ConfigError(
                f"algorithm.kl_ctrl.type: unknown value '{self.type}'; known: "
                f"{', '.join(CONTROLLER_TYPES)}"
            )
        if self.type == "adaptive" and not (self.horizon > 0 and self.target_kl > 0):
            raise ConfigError(
                "algorithm.kl_ctrl.horizon and target_kl must be > 0 with type=adaptive, got "
                f"{self.horizon} and {self.target_kl}"
            )

    def after_batch(self, current_kl: float, *, num_rows: int) -> KlController:
        """The state after a batch of `num_rows` rows whose mean divergence was `current_kl`."""
        if self.type == "fixed":
            return self
        error = current_kl / self.target_kl - 1.0
        clipped = min(max(error, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        return dataclasses.replace(self, coef=self.coef * (1.0 + clipped * num_rows / self.horizon))
