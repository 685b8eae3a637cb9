"""`results.json` of an evaluation: made from the stored responses, and read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.errors import DataError
from sluice.evaluation.statistics import (
    Estimate,
    PromptScores,
    estimate,
    mean_variable,
    pass_estimates,
    prompt_mean,
)
from sluice.evaluation.stored_responses import StoredPrompt, read_responses, response_files
from sluice.json_objects import DECODE_ERRORS
from sluice.types import FinishReason
from sluice.whole_file import write_whole

RESULTS_NAME = "results.json"


class BenchmarkResults(msgspec.Struct, frozen=True):
    """The numbers of one benchmark; docs/evaluation.md has more.

    Attributes:
        prompts: finished, graded or not. Those of an `Estimate` are the graded ones.
        failed_samples: responses without a grade.
        variable: what `mean` is of: ``acc``, or ``reward``.
        response_tokens: of a response, in the mean.
        cut_off: share of the responses that ended at the limit of tokens.
    """

    prompts: int
    failed_samples: int
    metrics: dict[str, float]
    variable: str
    mean: Estimate | None
    pass_at_k: dict[int, Estimate]
    response_tokens: float
    cut_off: float


class Results(msgspec.Struct, frozen=True):
    """All of an evaluation.

    Attributes:
        model: folder of the evaluated checkpoint.
        sampling: temperature, top_p, top_k and the like.
        seconds: that its last start took.
    """

    model: str
    sampling: dict[str, Any]
    samples_per_prompt: int
    seconds: float
    benchmarks: dict[str, BenchmarkResults]


def write_results(folder: Path, results: Results) -> Results:
    """Write the results of an evaluation to its folder, with benchmarks made from its stored
    responses, and return them.

    The same responses give the same bytes.

    Args:
        results: all but its benchmarks count.

    Raises:
        DataError: there are no responses, or a line of them is damaged.
        OSError: a file cannot be read or written.
    """
    benchmarks = {
        name: benchmark_results(prompt_scores(read_responses(file)), results.samples_per_prompt)
        for name, file in response_files(folder).items()
    }
    results = msgspec.structs.replace(results, benchmarks=benchmarks)
    content = msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n"
    write_whole(folder / RESULTS_NAME, content)
    return results


def read_results(folder: Path) -> Results:
    """Return the results of an evaluation.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    file = folder / RESULTS_NAME
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}; give the --output folder of an evaluation that ended"
        ) from error
    except DECODE_ERRORS as error:
        raise DataError(f"{file}: {error}; run the evaluation's command again") from error


def prompt_scores(stored: Iterable[tuple[int, StoredPrompt]]) -> list[PromptScores]:
    """Return what statistics need of the prompts, in the order of their positions.

    Args:
        stored: as `read_responses` yields them; their texts are not kept.
    """
    prompts = []
    for offset, prompt in stored:
        scores = tuple(sample.scored for sample in prompt.samples)
        graded = tuple(score for score in scores if score is not None)
        prompts.append(
            PromptScores(
                position=prompt.position,
                key=prompt.key,
                data_source=prompt.data_source,
                scores=graded,
                num_failed=len(scores) - len(graded),
                num_tokens=sum(sample.tokens for sample in prompt.samples),
                num_cut=sum(
                    sample.finish_reason == FinishReason.LENGTH for sample in prompt.samples
                ),
                offset=offset,
            )
        )
    return sorted(prompts, key=lambda scored: scored.position)


def benchmark_results(
    prompts: Sequence[PromptScores], samples_per_prompt: int, variable: str | None = None
) -> BenchmarkResults:
    """Return the numbers of the prompts of one benchmark.

    Args:
        variable: what the mean is of; ``None``: as `mean_variable`.
    """
    graded = [prompt for prompt in prompts if prompt.scores]
    num_failed = sum(prompt.num_failed for prompt in prompts)
    variable = variable or mean_variable(graded)
    means = [mean for prompt in graded if (mean := prompt_mean(prompt, variable)) is not None]
    num_samples = max(1, sum(prompt.num_samples for prompt in prompts))
    counts = {
        "val-aux/num_prompts": float(len(graded)),
        "val-aux/num_failed_samples": float(num_failed),
    }
    metrics = validation_metrics(
        [ValidationPrompt(prompt.data_source, prompt.scores) for prompt in graded]
    )
    return BenchmarkResults(
        prompts=len(prompts),
        failed_samples=num_failed,
        metrics=metrics | counts,
        variable=variable,
        mean=estimate(means),
        pass_at_k=pass_estimates(graded, samples_per_prompt),
        response_tokens=sum(prompt.num_tokens for prompt in prompts) / num_samples,
        cut_off=sum(prompt.num_cut for prompt in prompts) / num_samples,
    )
