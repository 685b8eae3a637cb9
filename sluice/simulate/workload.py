"""Prompts of a simulation: how often they are solved and how long answers are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta

from sluice.algorithm.groups.filter import filter_values
from sluice.algorithm.sampling.pass_rates import HARD_BELOW
from sluice.config.loading.yaml_text import parse_document
from sluice.config.problems import Problem, raise_problems
from sluice.config.run import expectation
from sluice.errors import ConfigError
from sluice.types import PromptEnd

Floats = npt.NDArray[np.float64]

NUM_PROMPTS = 8192
LONG_SHARE = 0.1
"""Prompts with the longest answers, which count as long."""

_MIN_RATE = 1e-6
"""Log odds are finite."""

_Tokens = Annotated[float, Meta(ge=1, le=1e7)]
_Sigma = Annotated[float, Meta(ge=0, le=5)]


@dataclass(frozen=True, slots=True)
class SimulatedPrompt:
    """A prompt as it is issued.

    Args:
        key: names it across attempts.
        pass_rate: true probability that a sample is right, now.
        is_long: among the tenth of prompts with the longest expected responses.
        number: its place in the workload.
    """

    key: str
    pass_rate: float
    is_long: bool
    number: int

    @property
    def is_hard(self) -> bool:
        """Whether it is hardly ever solved."""
        return self.pass_rate < HARD_BELOW


@dataclass(frozen=True, slots=True)
class SimulatedSamples:
    """All samples that a group could have.

    Args:
        tokens: response length of each.
        are_right: whether each is right.
        values: the group filter's metric of each; ``None``: 1 of a right one, 0 of a wrong one.
        is_filtered: whether there is a group filter.
    """

    tokens: list[int]
    are_right: list[bool]
    values: list[float] | None = None
    is_filtered: bool = True

    def end(self, num_samples: int) -> PromptEnd | None:
        """Return how a group of its first `num_samples` (>= 1) ends if filtered; ``None``: kept."""
        if not self.is_filtered:
            return None
        grades = self.are_right[:num_samples]
        return filter_values(self.values[:num_samples] if self.values else grades, grades)

    @property
    def is_mixed(self) -> bool:
        """Whether the whole group would be kept: its metric differs, or there is no filter."""
        return self.end(len(self.are_right)) is None


class Workload(Protocol):
    """A data set with a policy's answers to it; the same calls give the same answers."""

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """Return the prompt at `position` (0, 1, ... over all epochs) under a policy version."""
        ...

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        """Return the samples of a group; another `num_restarts` (0, 1, ...) has others."""
        ...


class BetaComponent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts whose pass rates are distributed as Beta(alpha, beta).

    The mean pass rate is alpha / (alpha + beta). `weight` is how many prompts are of this kind,
    relative to the weights of the other ones.
    """

    alpha: Annotated[float, Meta(ge=0.01, le=1e6)]
    beta: Annotated[float, Meta(ge=0.01, le=1e6)]
    weight: Annotated[float, Meta(ge=0.001, le=1e6)] = 1.0


# Three stages of a run. Over a run prompts move from hard to easy, so that groups that are all
# right become more frequent (DAPO, figure 3b). docs/simulator.md has the numbers and reasons.
def _mixture(*, hard: float, middle: float, easy: float) -> tuple[BetaComponent, ...]:
    """Return kinds of prompts with their shares, which sum to 1."""
    return (
        BetaComponent(0.25, 5.0, hard),
        BetaComponent(1.2, 1.2, middle),
        BetaComponent(6.0, 0.25, easy),
    )


MIXTURES = {
    "early": _mixture(hard=0.60, middle=0.30, easy=0.10),
    "mid": _mixture(hard=0.32, middle=0.40, easy=0.28),
    "late": _mixture(hard=0.20, middle=0.25, easy=0.55),
}


class ResponseLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lognormal lengths of responses, in tokens.

    A prompt with pass rate p has the median ``solved * p + unsolved * (1 - p)``, times a lognormal
    factor of its own. The sigmas are standard deviations of the logarithm: of prompts' own factors,
    and of the samples of one prompt. A response of `max_tokens` is cut off, and wrong.
    """

    median_tokens_solved: _Tokens = 1500.0
    median_tokens_unsolved: _Tokens = 3500.0
    sigma_between_prompts: _Sigma = 0.4
    sigma_within_prompt: _Sigma = 0.5
    max_tokens: Annotated[int, Meta(ge=2, le=10_000_000)] = 16_384


class WorkloadDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distributions of a data set and of a policy's answers to it.

    `num_prompts` are the rows of the data set. `drift_per_version` is the log odds that every
    prompt's pass rate gains with a version.
    """

    pass_rates: Annotated[tuple[BetaComponent, ...], Meta(min_length=1)]
    lengths: ResponseLengths = ResponseLengths()
    num_prompts: Annotated[int, Meta(ge=1, le=10_000_000)] = NUM_PROMPTS
    drift_per_version: Annotated[float, Meta(ge=-1, le=1)] = 0.002


class DescribedWorkload:
    """Prompts of a description, epoch after epoch in an order of each epoch's own.

    Args:
        description: the distributions.
        seed: decides prompts, orders and samples.
    """

    def __init__(self, description: WorkloadDescription, seed: int = 0) -> None:
        self._description = description
        self._seed = seed
        lengths, num_prompts = description.lengths, description.num_prompts
        draws = np.random.default_rng([seed, 0])
        rates = _pass_rates(description, draws)
        self._log_odds = np.log(rates) - np.log1p(-rates)
        medians = lengths.median_tokens_solved * rates + lengths.median_tokens_unsolved * (
            1.0 - rates
        )
        factors = lengths.sigma_between_prompts * draws.standard_normal(num_prompts)
        self._log_medians = np.log(medians) + factors
        self._are_long = self._log_medians > np.quantile(self._log_medians, 1.0 - LONG_SHARE)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """Return the prompt; see `Workload`."""
        epoch, place = divmod(position, self._description.num_prompts)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, 1, epoch])
            self._epoch, self._order = epoch, order.permutation(self._description.num_prompts)
        number = int(self._order[place])
        log_odds = float(self._log_odds[number]) + self._description.drift_per_version * version
        rate = float(1.0 / (1.0 + np.exp(-log_odds)))
        return SimulatedPrompt(str(number), rate, bool(self._are_long[number]), number)

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        """Return the samples; see `Workload`."""
        lengths = self._description.lengths
        draws = np.random.default_rng([self._seed, 2, position, num_restarts])
        deviations = lengths.sigma_within_prompt * draws.standard_normal(num_samples)
        sampled = np.exp(self._log_medians[prompt.number] + deviations)
        tokens = np.clip(np.rint(sampled), 1, lengths.max_tokens).astype(np.int64)
        are_right = (draws.random(num_samples) < prompt.pass_rate) & (tokens < lengths.max_tokens)
        return SimulatedSamples(tokens.tolist(), are_right.tolist())


def _pass_rates(description: WorkloadDescription, draws: np.random.Generator) -> Floats:
    """Return the values of all prompts: [num_prompts]."""
    kinds, num_prompts = description.pass_rates, description.num_prompts
    weights = np.array([kind.weight for kind in kinds])
    chosen = draws.choice(len(kinds), size=num_prompts, p=weights / weights.sum())
    by_kind = np.stack([draws.beta(kind.alpha, kind.beta, num_prompts) for kind in kinds])
    rates = by_kind[chosen, np.arange(num_prompts)]
    return np.clip(rates, _MIN_RATE, 1.0 - _MIN_RATE)


def mixture_workload(
    mixture: str, seed: int = 0, num_prompts: int = NUM_PROMPTS
) -> DescribedWorkload:
    """Return the prompts of a mixture, a name in `MIXTURES`.

    Raises:
        ConfigError: there is no such mixture.
    """
    if mixture not in MIXTURES:
        raise ConfigError(f"mixture '{mixture}' is none of {', '.join(MIXTURES)}")
    return DescribedWorkload(WorkloadDescription(MIXTURES[mixture], num_prompts=num_prompts), seed)


def read_workload(file: Path) -> WorkloadDescription:
    """Read a description; fields that are left out are as in the mixtures of docs/simulator.md.

    Raises:
        ConfigError: the file cannot be read, or fields are wrong: all of them are named, each with
            its value and the expected one.
    """
    source = f"--workload {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}; give a YAML file") from error
    document = parse_document(text, source)
    raise_problems(list(_problems(WorkloadDescription, document, "")), source)
    return msgspec.convert(document, WorkloadDescription)


def _problems(kind: type[msgspec.Struct], value: object, at: str) -> Iterator[Problem]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    names = ", ".join(fields)
    if not isinstance(value, dict):
        yield Problem(at or "the file", value, f": expected a mapping of {names}")
        return
    prefix = f"{at}." if at else ""
    for name in value.keys() - fields.keys():
        yield Problem(f"{prefix}{name}", value[name], "is no field", f"the fields are {names}")
    for name, field in fields.items():
        field_value = value.get(name, UNSET)
        if name == "lengths" and field_value is not UNSET:
            yield from _problems(ResponseLengths, field_value, name)
        elif name == "pass_rates" and isinstance(field_value, list) and field_value:
            for number, component in enumerate(field_value):
                yield from _problems(BetaComponent, component, f"{name}[{number}]")
        elif field_value is not UNSET:
            yield from _type_problems(f"{prefix}{name}", field_value, field.type)
        elif field.required:
            yield Problem(f"{prefix}{name}", UNSET, f"is missing: {expectation(field.type)}")


def _type_problems(path: str, value: object, annotation: object) -> Iterator[Problem]:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        yield Problem(path, value, f": expected {expectation(annotation)}")
