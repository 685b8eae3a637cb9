"""Folders of evaluations as `sluice eval --model` leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.evaluation.results import Results, write_results
from sluice.evaluation.stored_responses import FOLDER_NAME


def sample(
    response: str = "Answer: 4", *, acc: float | None = 1.0, **changed: Any
) -> dict[str, Any]:
    """A response as it is stored, graded ``acc``; ``None``: its grading failed."""
    failed = acc is None
    return {
        "response": response,
        "reward": None if acc is None else 2 * acc - 1,
        "metrics": {} if acc is None else {"acc": acc, "score": 2 * acc - 1, "pred": response},
        "failure": "scorer_timeout: no answer" if failed else None,
        "tokens": 5,
        "finish_reason": "stop",
        "turns": 1,
        **changed,
    }


def prompt(position: int, samples: Sequence[Mapping[str, Any]], **changed: Any) -> dict[str, Any]:
    """A finished prompt as it is stored."""
    return {
        "position": position,
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"What is {position} + 2?"}],
        "ground_truth": str(position + 2),
        "extra_info": {"index": position},
        "samples": list(samples),
        **changed,
    }


def graded(position: int, *accuracies: float | None) -> dict[str, Any]:
    """A finished prompt whose responses have these accuracies."""
    return prompt(position, [sample(acc=one) for one in accuracies])


def store(folder: Path, prompts: Sequence[Mapping[str, Any]], benchmark: str = "math") -> Path:
    """Write a file of responses and return it."""
    file = folder / FOLDER_NAME / f"{benchmark}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in prompts))
    return file


def evaluation(folder: Path, prompts: Sequence[Mapping[str, Any]], benchmark: str = "math") -> Path:
    """Write the folder of an evaluation that ended, and return it."""
    store(folder, prompts, benchmark)
    most = max(len(one["samples"]) for one in prompts)
    write_results(folder, Results("models/a", {"top_p": 0.7}, most, 1.5, {}))
    return folder
