"""The commands of an evaluation, and what it stores."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import print_line
from sluice.evaluation.results import read_results
from sluice.evaluation.stored_responses import StoredPrompt, read_responses, response_files

SLUICE = (sys.executable, "-m", "sluice.cli.main")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A stand-alone, greedy evaluation of a model's files on the quickstart's held-out problems.

    Attributes:
        model: folder of the model.
        benchmark: parquet file.
        config: file with the quickstart's settings.
        output: folder of the results.
        samples: of each prompt.
        settings: further ones.
    """

    model: Path
    benchmark: Path
    config: Path
    output: Path
    samples: int = 1
    settings: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command; the same one resumes."""
        command = [*SLUICE, "eval", "--model", str(self.model), "--benchmark", str(self.benchmark)]
        command += ["-n", str(self.samples), "--temperature", "0", "--engine", "torch"]
        command += ["--replicas", "2", "--config", str(self.config)]
        command += ["--output", str(self.output), *self.settings]
        print_line(" ".join(command[2:]))
        return command

    def lines(self) -> list[str]:
        """Return what is stored so far, without a last line that is not complete."""
        files = sorted((self.output / "responses").glob("*.jsonl"))
        texts = [file.read_text(encoding="utf-8") for file in files]
        # `splitlines` knows other ends of lines; the last part may be cut.
        return [line for text in texts for line in text.split("\n")[:-1]]

    def prompts(self) -> dict[int, StoredPrompt]:
        """Return the finished prompts by their positions."""
        files = response_files(self.output).values()
        return {one.position: one for file in files for _, one in read_responses(file)}

    def metrics(self) -> dict[str, float]:
        """Return the results, by verl's names."""
        (benchmark,) = read_results(self.output).benchmarks.values()
        return benchmark.metrics


def held_out_file(folder: Path) -> Path:
    """Return the held-out problems among the quickstart's files of a benchmark's folder."""
    return folder / "assets" / "data" / "test.parquet"


def responses(prompt: StoredPrompt) -> list[str]:
    """Return the texts that a finished prompt got."""
    return [sample.response for sample in prompt.samples]


def differing(one: Mapping[Any, Sequence[str]], other: Mapping[Any, Sequence[str]]) -> int:
    """Return the number of prompts that have other responses, or are in one of both only."""
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def largest_difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the largest one of metrics that both have; nan: they have none in common."""
    shared = one.keys() & other.keys()
    return max((abs(one[name] - other[name]) for name in shared), default=float("nan"))
