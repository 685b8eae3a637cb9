"""The settings of rollout correction: levels, bounds and thresholds. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.errors import ConfigError

REJECTION_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)

_SECTION = "algorithm.rollout_correction"

BYPASS_LOSS_MODE = "bypass_mode"


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """Bounds of importance weights.

    Args:
        upper: > 0. Alone: truncation (TIS), larger weights become this.
        lower: > 0 or None. With it: a band (IcePop), weights outside of it become 0.
    """

    upper: float
    lower: float | None = None


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Keep what has ``lower <= statistic <= upper``.

    Args:
        option: one of `REJECTION_OPTIONS`.
        lower: in the unit of the statistic, -inf where the option has no lower bound.
        upper: in the same unit; for k1 both are logarithms of the configured ratios.
    """

    option: str
    lower: float
    upper: float

    @property
    def estimator(self) -> str:
        """k1, k2 or k3."""
        return self.option[-2:]

    @property
    def scope(self) -> str:
        """token, seq_sum, seq_mean or seq_max."""
        return self.option[:-3]


def weight_bounds(threshold: float | str) -> WeightBounds:
    """Read `rollout_is_threshold`: a number, or ``"lower_upper"``.

    Raises:
        ConfigError: no number, not > 0, or lower above upper.
    """
    key = f"{_SECTION}.rollout_is_threshold"
    lower, upper = _numbers(str(threshold), key, "a number, or lower_upper such as 0.5_2.0")
    if lower is not None and lower > upper:
        raise ConfigError(f"{key} = {threshold!r}: the lower bound is above the upper; swap them")
    return WeightBounds(upper, lower)


def rejection_rules(options: str, thresholds: float | str | None) -> tuple[RejectionRule, ...]:
    """Read `rollout_rs` and `rollout_rs_threshold`.

    Args:
        options: names separated by commas; a repeated name counts once.
        thresholds: one for all or one for each name, separated by commas. For k1 a ratio, or
            ``lower_upper`` (lower is 1 / upper by default); for k2 and k3 the largest value.

    Raises:
        ConfigError: an unknown name, or thresholds that are missing, too few or too many, no
            numbers, not > 0, or lower above upper.
    """
    names = list(dict.fromkeys(part.strip() for part in options.split(",") if part.strip()))
    unknown = [name for name in names if name not in REJECTION_OPTIONS]
    if unknown or not names:
        raise ConfigError(
            f"{_SECTION}.rollout_rs = {options!r}: expected one or more of "
            f"{', '.join(REJECTION_OPTIONS)}, separated by commas"
        )
    thresholds_text = "" if thresholds is None else str(thresholds)
    specs = [part.strip() for part in thresholds_text.split(",") if part.strip()]
    if len(specs) not in {1, len(names)}:
        raise ConfigError(
            f"{_SECTION}.rollout_rs_threshold = {thresholds!r}: expected one threshold, or one for "
            f"each of {', '.join(names)}"
        )
    if len(specs) == 1:
        specs *= len(names)
    return tuple(_rule(name, spec) for name, spec in zip(names, specs, strict=True))


def _rule(name: str, spec: str) -> RejectionRule:
    key = f"{_SECTION}.rollout_rs_threshold"
    if name.endswith("k1"):
        lower, upper = _numbers(spec, key, f"for {name} a ratio, or lower_upper such as 0.5_2.0")
        lower = 1.0 / upper if lower is None else lower
        if lower > upper:
            raise ConfigError(
                f"{key} = '{spec}': {name} would reject everything, as its lower bound {lower:g} "
                f"is above {upper:g}; give lower_upper, or a single ratio of 1 or more"
            )
        return RejectionRule(name, math.log(lower), math.log(upper))
    lower, upper = _numbers(spec, key, f"for {name} one upper bound")
    if lower is not None:
        raise ConfigError(f"{key} = '{spec}': {name} has an upper bound only; give one number")
    return RejectionRule(name, -math.inf, upper)


def _numbers(spec: str, key: str, expected: str) -> tuple[float | None, float]:
    """``"upper"`` or ``"lower_upper"``."""
    try:
        numbers = [float(part) for part in spec.strip().split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0.0 < n < math.inf for n in numbers):
        raise ConfigError(f"{key} = {spec!r}: expected {expected}, all > 0")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionSettings:
    """`algorithm.rollout_correction` by verl's names and defaults.

    Raises:
        ConfigError: a name is unknown or a threshold cannot be read.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    loss_type: str = "ppo_clip"

    def __post_init__(self) -> None:
        self.bounds()
        self.rules()

    def bounds(self) -> WeightBounds:
        """Return bounds of the importance weights."""
        return weight_bounds(self.rollout_is_threshold)

    def rules(self) -> tuple[RejectionRule, ...]:
        """Return rejection rules, none without `rollout_rs`."""
        if self.rollout_rs is None:
            return ()
        return rejection_rules(self.rollout_rs, self.rollout_rs_threshold)
