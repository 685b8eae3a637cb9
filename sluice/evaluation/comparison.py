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
        scores = (score for prompts in self.prompts.values() for score in prompts.values())
        return max((score.num_samples for score in scores), default=0)


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """One prompt in all evaluations; those that lack it have ``None``."""

    key: PromptKey
    position: int
    means: tuple[float | None, ...]

    @property
    def spread(self) -> float:
        """How far apart the evaluations are; 0 if fewer than two have the prompt."""
        means = [mean for mean in self.means if mean is not None]
        return max(means) - min(means) if means else 0.0


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
    return [_read_evaluation(folder, label) for folder, label in zip(folders, labels, strict=True)]


def compare_benchmarks(evaluations: Sequence[Evaluation]) -> list[ComparedBenchmark]:
    """Return all benchmarks that an evaluation has, in the order of their names."""
    names = sorted({name for evaluation in evaluations for name in evaluation.prompts})
    return [_compare_benchmark(name, evaluations) for name in names]


def comparison_object(
    evaluations: Sequence[Evaluation], benchmarks: Sequence[ComparedBenchmark]
) -> dict[str, Any]:
    """Return a comparison without texts, as JSON; differences are from the first evaluation."""
    return {
        "evaluations": [
            {
                "label": evaluation.label,
                "folder": str(evaluation.folder),
                "has_ended": evaluation.results is not None,
            }
            for evaluation in evaluations
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


def _read_evaluation(folder: Path, label: str) -> Evaluation:
    files = response_files(folder)
    has_ended = (folder / RESULTS_NAME).is_file()
    return Evaluation(
        label,
        folder,
        read_results(folder) if has_ended else None,
        files,
        {name: _scores_by_key(prompt_scores(read_responses(file))) for name, file in files.items()},
    )


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the paths without the folder that all are in."""
    common = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(common)) for folder in folders]


def _scores_by_key(prompts: Sequence[PromptScores]) -> dict[PromptKey, PromptScores]:
    num_copies: Counter[bytes] = Counter()
    keyed = {}
    for prompt in prompts:
        keyed[prompt.key, num_copies[prompt.key]] = prompt
        num_copies[prompt.key] += 1
    return keyed


def _compare_benchmark(name: str, evaluations: Sequence[Evaluation]) -> ComparedBenchmark:
    prompts = [evaluation.prompts.get(name, {}) for evaluation in evaluations]
    is_accuracy = all(mean_variable(list(by_key.values())) == ACCURACY for by_key in prompts)
    variable = ACCURACY if is_accuracy else REWARD
    results = tuple(
        benchmark_results(list(by_key.values()), evaluation.samples_per_prompt, variable)
        if by_key
        else None
        for evaluation, by_key in zip(evaluations, prompts, strict=True)
    )
    means = [_prompt_means(by_key, variable) for by_key in prompts]
    return ComparedBenchmark(
        name,
        variable,
        results,
        (None, *(paired_difference(means[0], prompt_means) for prompt_means in means[1:])),
        _compare_prompts(prompts, means),
    )


def _prompt_means(
    prompts: Mapping[PromptKey, PromptScores], variable: str
) -> dict[PromptKey, float]:
    means = {key: prompt_mean(prompt, variable) for key, prompt in prompts.items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def _compare_prompts(
    prompts: Sequence[Mapping[PromptKey, PromptScores]],
    means: Sequence[Mapping[PromptKey, float]],
) -> tuple[ComparedPrompt, ...]:
    positions: dict[PromptKey, int] = {}
    for by_key in prompts:
        for key, prompt in by_key.items():
            positions.setdefault(key, prompt.position)
    compared = [
        ComparedPrompt(key, position, tuple(by_key.get(key) for by_key in means))
        for key, position in positions.items()
    ]
    return tuple(sorted(compared, key=lambda prompt: (-prompt.spread, prompt.position)))
