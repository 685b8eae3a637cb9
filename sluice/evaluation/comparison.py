"""Evaluations beside each other: the same benchmarks, prompt by prompt."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sluice.errors import DataError
from sluice.evaluation.results import (
    RESULTS_NAME,
    BenchmarkResults,
    Results,
    benchmark_results,
    prompt_scores,
    read_results,
)
from sluice.evaluation.statistics import (
    ACCURACY,
    REWARD,
    Estimate,
    PromptScores,
    mean_variable,
    paired_difference,
    prompt_mean,
)
from sluice.evaluation.stored_responses import read_responses, response_files

PromptKey = tuple[bytes, int]
"""What a prompt is, and how many equal ones the benchmark has before it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluated checkpoint.

    Attributes:
        label: a name that no other one of the comparison has.
        results: what it wrote at its end; ``None``: it has not ended.
        files: of its responses, by benchmark.
        prompts: finished ones, by benchmark.
    """

    label: str
    folder: Path
    results: Results | None
    files: Mapping[str, Path]
    prompts: Mapping[str, Mapping[PromptKey, PromptScores]]

    @property
    def samples_per_prompt(self) -> int:
        """As asked for, or as found."""
        if self.results is not None:
            return self.results.samples_per_prompt
        scores = (one for prompts in self.prompts.values() for one in prompts.values())
        return max((one.num_samples for one in scores), default=0)


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """One prompt in all evaluations; those that lack it have ``None``."""

    key: PromptKey
    position: int
    means: tuple[float | None, ...]

    @property
    def spread(self) -> float:
        """How far apart the evaluations are; 0 if fewer than two have the prompt."""
        known = [mean for mean in self.means if mean is not None]
        return max(known) - min(known) if known else 0.0


@dataclass(frozen=True, slots=True)
class ComparedBenchmark:
    """One benchmark in all evaluations; those that lack it have ``None``.

    Attributes:
        variable: what all means are of: ``acc`` if all evaluations have it.
        differences: of each evaluation from the first one, over the prompts that both have.
        prompts: those that differ most first, then by position.
    """

    name: str
    variable: str
    results: tuple[BenchmarkResults | None, ...]
    differences: tuple[Estimate | None, ...]
    prompts: tuple[ComparedPrompt, ...]


def read_evaluations(folders: Sequence[Path]) -> list[Evaluation]:
    """Return the evaluations in some folders, in this order; one that has not ended, too.

    Raises:
        DataError: a folder is named twice, holds no responses, or a file cannot be used.
    """
    resolved = Counter(folder.resolve() for folder in folders)
    for folder, count in resolved.items():
        if count > 1:
            raise DataError(f"{folder}: named {count} times; name each evaluation once")
    labels = _labels([folder.resolve() for folder in folders])
    return [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]


def compared_benchmarks(evaluations: Sequence[Evaluation]) -> list[ComparedBenchmark]:
    """Return all benchmarks that an evaluation has, in the order of their names."""
    names = sorted({name for one in evaluations for name in one.prompts})
    return [_compared(name, evaluations) for name in names]


def comparison_object(
    evaluations: Sequence[Evaluation], benchmarks: Sequence[ComparedBenchmark]
) -> dict[str, Any]:
    """Return a comparison without texts, as JSON; differences are from the first evaluation."""
    return {
        "evaluations": [
            {"label": one.label, "folder": str(one.folder), "has_ended": one.results is not None}
            for one in evaluations
        ],
        "benchmarks": {
            benchmark.name: {
                "variable": benchmark.variable,
                "results": msgspec.to_builtins(benchmark.results, str_keys=True),
                "differences": msgspec.to_builtins(benchmark.differences),
            }
            for benchmark in benchmarks
        },
    }


def _read(folder: Path, label: str) -> Evaluation:
    files = response_files(folder)
    has_ended = (folder / RESULTS_NAME).is_file()
    return Evaluation(
        label,
        folder,
        read_results(folder) if has_ended else None,
        files,
        {name: _keyed(prompt_scores(read_responses(file))) for name, file in files.items()},
    )


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the paths without the folder that all are in."""
    common = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(common)) for folder in folders]


def _keyed(prompts: Sequence[PromptScores]) -> dict[PromptKey, PromptScores]:
    seen: Counter[bytes] = Counter()
    keyed = {}
    for one in prompts:
        keyed[one.key, seen[one.key]] = one
        seen[one.key] += 1
    return keyed


def _compared(name: str, evaluations: Sequence[Evaluation]) -> ComparedBenchmark:
    prompts = [one.prompts.get(name, {}) for one in evaluations]
    is_accuracy = all(mean_variable(list(by_key.values())) == ACCURACY for by_key in prompts)
    variable = ACCURACY if is_accuracy else REWARD
    results = tuple(
        benchmark_results(list(by_key.values()), one.samples_per_prompt, variable)
        if by_key
        else None
        for one, by_key in zip(evaluations, prompts, strict=True)
    )
    means = [_means(by_key, variable) for by_key in prompts]
    return ComparedBenchmark(
        name,
        variable,
        results,
        (None, *(paired_difference(means[0], other) for other in means[1:])),
        _compared_prompts(prompts, means),
    )


def _means(prompts: Mapping[PromptKey, PromptScores], variable: str) -> dict[PromptKey, float]:
    means = {key: prompt_mean(one, variable) for key, one in prompts.items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def _compared_prompts(
    prompts: Sequence[Mapping[PromptKey, PromptScores]],
    means: Sequence[Mapping[PromptKey, float]],
) -> tuple[ComparedPrompt, ...]:
    positions: dict[PromptKey, int] = {}
    for by_key in prompts:
        for key, one in by_key.items():
            positions.setdefault(key, one.position)
    compared = [
        ComparedPrompt(key, position, tuple(by_key.get(key) for by_key in means))
        for key, position in positions.items()
    ]
    return tuple(sorted(compared, key=lambda one: (-one.spread, one.position)))
