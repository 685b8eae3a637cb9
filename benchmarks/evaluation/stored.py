"""The commands of an evaluation, and what it stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import print_line

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

    def prompts(self) -> dict[int, Mapping[str, Any]]:
        """Return the finished prompts by their positions."""
        found: list[dict[str, Any]] = [json.loads(line) for line in self.lines()]
        return {one["position"]: one for one in found}

    def metrics(self) -> dict[str, float]:
        """Return the results, by verl's names."""
        results = json.loads((self.output / "results.json").read_text(encoding="utf-8"))
        (benchmark,) = results["benchmarks"].values()
        return dict(benchmark["metrics"])


def held_out_file(folder: Path) -> Path:
    """Return the held-out problems among the quickstart's files of a benchmark's folder."""
    return folder / "assets" / "data" / "test.parquet"


def responses(prompt: Mapping[str, Any]) -> list[str]:
    """Return the texts that a finished prompt got."""
    return [str(sample["response"]) for sample in prompt["samples"]]


def differing(one: Mapping[Any, Sequence[str]], other: Mapping[Any, Sequence[str]]) -> int:
    """Return the number of prompts that have other responses, or are in one of both only."""
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def largest_difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the largest one of metrics that both have; nan: they have none in common."""
    shared = one.keys() & other.keys()
    return max((abs(one[name] - other[name]) for name in shared), default=float("nan"))
