"""Held-out metrics by verl's names: mean@N, std@N, best@k, worst@k, maj@k per data source.

best@k, worst@k and maj@k are bootstrap estimates: 1000 draws of k responses with replacement from
the N of a prompt, always from the same random state, so that equal responses give equal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sluice.types import Scored

NUM_BOOTSTRAP_SAMPLES = 1000
BOOTSTRAP_SEED = 42
CORE_PREFIXES = ("mean", "maj", "best")

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ValidationPrompt:
    """All graded responses to one held-out prompt, at least one."""

    data_source: str
    scores: tuple[Scored, ...]


def validation_metrics(prompts: Sequence[ValidationPrompt]) -> dict[str, float]:
    """Average the values of `prompt_values` over prompts."""
    return means(prompt_values(prompts))


def means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each metric over its prompts."""
    return {name: float(np.mean(prompt_values)) for name, prompt_values in values.items()}


def standard_errors(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the standard error of each mean over prompts; none for fewer than two prompts."""
    return {
        name: float(np.std(prompt_values, ddof=1)) / len(prompt_values) ** 0.5
        for name, prompt_values in values.items()
        if len(prompt_values) > 1
    }


def prompt_values(prompts: Sequence[ValidationPrompt]) -> dict[str, list[float]]:
    """Return every metric's values by name, one for each prompt of its data source.

    Variables are ``reward`` (with shaping), ``score`` and each of the scorer's metrics that all
    responses to a prompt have. Names are ``val-core/{source}/{variable}/{metric}`` for the mean,
    best and maj at the largest N of ``acc`` (of ``reward`` where there is no ``acc``), and
    ``val-aux/...`` for all others. A response without a prediction votes too, as in verl
    (`verl/trainer/ppo/metric_utils.py`, `calc_maj_val`); a data source without any prediction has
    no maj.
    """
    by_source: dict[str, dict[str, dict[str, list[float]]]] = {}
    voting = {p.data_source for p in prompts if any(s.prediction is not None for s in p.scores)}
    for prompt in prompts:
        variables = by_source.setdefault(prompt.data_source, {})
        votes = prompt.data_source in voting
        majority = majorities([s.prediction for s in prompt.scores]) if votes else None
        for variable, values in _variables(prompt.scores).items():
            by_metric = variables.setdefault(variable, {})
            for name, value in prompt_metrics(values, majority).items():
                by_metric.setdefault(name, []).append(value)
    return {
        f"{_section(variable, name, variables)}/{source}/{variable}/{name}": values
        for source, variables in by_source.items()
        for variable, metrics in variables.items()
        for name, values in metrics.items()
    }


def prompt_metrics(values: Values, majority: Mapping[int, Indices] | None) -> dict[str, float]:
    """Return all metrics of one variable over the responses to one prompt.

    Args:
        values: float64 [N].
        majority: `majorities` of the N responses, or ``None`` for no maj@k.

    Returns:
        ``mean@N`` and for N > 1 ``std@N`` (population) and, for k = 2, 4, 8, ... below N and for
        k = N, mean and std over the draws: ``best@k/mean``, ``worst@k/std``, ``maj@k/mean``, ...
    """
    num = values.size
    metrics = {f"mean@{num}": float(values.mean())}
    if num == 1:
        return metrics
    metrics[f"std@{num}"] = float(values.std())
    for size in bootstrap_sizes(num):
        draws = bootstrap_indices(num, size)
        sampled = values[draws]
        estimates = {"best": sampled.max(axis=1), "worst": sampled.min(axis=1)}
        if majority is not None:
            estimates["maj"] = values[majority[size]]
        for name, estimate in estimates.items():
            metrics[f"{name}@{size}/mean"] = float(estimate.mean())
            metrics[f"{name}@{size}/std"] = float(estimate.std())
    return metrics


def bootstrap_sizes(num_responses: int) -> tuple[int, ...]:
    """Return powers of two from 2 below `num_responses`, and `num_responses` itself."""
    powers = (1 << exponent for exponent in range(1, num_responses.bit_length()))
    return (*(power for power in powers if power < num_responses), num_responses)


@lru_cache(maxsize=64)
def bootstrap_indices(num_responses: int, size: int) -> Indices:
    """Return response indices chosen with replacement, int64 [1000, size], read-only."""
    state = np.random.RandomState(BOOTSTRAP_SEED)
    draws = state.randint(0, num_responses, size=(NUM_BOOTSTRAP_SAMPLES, size), dtype=np.int64)
    draws = np.asfortranarray(draws)  # reductions over a draw are many times faster
    draws.setflags(write=False)
    return draws


def majorities(predictions: Sequence[str | None]) -> dict[int, Indices]:
    """Return the response that stands for each draw's majority, int64 [1000], by size of a draw.

    Args:
        predictions: the extracted answers to vote with. ``None`` is a vote like any other.
    """
    num = len(predictions)
    sizes = bootstrap_sizes(num) if num > 1 else ()
    return {size: majority_responses(predictions, bootstrap_indices(num, size)) for size in sizes}


def majority_responses(predictions: Sequence[str | None], draws: Indices) -> Indices:
    """Return the first response of each draw with its most frequent prediction, int64 [draws].

    Among equally frequent predictions the one sampled first wins. (Responses of one prediction may
    differ in reward through their length.)
    """
    numbers = {prediction: number for number, prediction in enumerate(dict.fromkeys(predictions))}
    codes = np.asarray([numbers[prediction] for prediction in predictions])
    rows = np.arange(len(draws))
    cells = rows[:, None] * len(numbers) + codes[draws]
    votes = np.bincount(cells.ravel())
    # argmax returns the first maximum: first member of the first-sampled winner.
    winners: Indices = draws[rows, votes[cells].argmax(axis=1)]
    return winners


def _variables(scores: Sequence[Scored]) -> dict[str, Values]:
    shared = [name for name in scores[0].metrics if all(name in s.metrics for s in scores)]
    columns = {name: [float(s.metrics[name]) for s in scores] for name in shared}
    columns["reward"] = [s.reward for s in scores]
    columns["score"] = [s.score for s in scores]
    return {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}


def _section(variable: str, name: str, variables: Mapping[str, Mapping[str, object]]) -> str:
    core_variable = "acc" if "acc" in variables else "reward"
    largest = max(_responses(response) for response in variables[variable])
    is_core = variable == core_variable and _responses(name) == largest
    return "val-core" if is_core and name.startswith(CORE_PREFIXES) else "val-aux"


def _responses(name: str) -> int:
    """Return the N or k in a metric's name, such as ``best@4/mean``."""
    return int(name.split("@")[1].split("/")[0])
