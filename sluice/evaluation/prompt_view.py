"""One prompt on the page: what each checkpoint answered, beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sluice.evaluation.comparison import ComparedPrompt
from sluice.evaluation.markup import Markup, element, joined
from sluice.evaluation.statistics import is_correct
from sluice.evaluation.stored_responses import StoredGrade, StoredPrompt, StoredSample
from sluice.telemetry.samples import shortened_middle

_MOST_CHARS, _EXCERPT_CHARS, _TRUTH_CHARS, _FAILURE_CHARS, _VALUE_CHARS = 4000, 300, 400, 400, 100


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt of one evaluation with the responses to show; texts are shortened.

    Attributes:
        question: the text of all turns of the prompt.
        ground_truth: what the scorer compared with.
        num_samples: all of its samples.
        num_correct: those that are correct.
        samples: the responses to show, each after its number.
    """

    question: str
    ground_truth: str
    data_source: str
    num_samples: int
    num_correct: int
    samples: tuple[tuple[int, StoredSample], ...]


def shown_prompt(prompt: StoredPrompt, most_responses: int) -> ShownPrompt:
    """Return what the page shows of a prompt: right and wrong responses, where there are both."""
    verdicts = [_is_right(one) for one in prompt.samples]
    right = [index for index, verdict in enumerate(verdicts) if verdict]
    wrong = [index for index, verdict in enumerate(verdicts) if not verdict]
    num_wrong = min(len(wrong), max(most_responses // 2, most_responses - len(right)))
    chosen = sorted([*wrong[:num_wrong], *right[: most_responses - num_wrong]])
    return ShownPrompt(
        shortened_middle(prompt.question, _MOST_CHARS),
        shortened_middle(_text(prompt.ground_truth), _TRUTH_CHARS),
        prompt.data_source,
        len(prompt.samples),
        len(right),
        tuple((index, _shortened(prompt.samples[index])) for index in chosen),
    )


def common_preamble(questions: Sequence[str]) -> int:
    """Return how many characters of instructions all prompts begin with, in whole words."""
    if len(set(questions)) <= 1:
        return 0
    first, last = min(questions), max(questions)  # what these share, all share
    shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return 1 + max(first.rfind(" ", 0, shared), first.rfind("\n", 0, shared))


def prompt_view(
    compared: ComparedPrompt,
    labels: Sequence[str],
    found: Sequence[ShownPrompt | None],
    preamble: int,
) -> Markup:
    """Return a prompt that opens to its responses.

    Args:
        compared: its means.
        labels: of the evaluations.
        found: its responses in each of them; ``None``: the evaluation lacks it.
        preamble: characters that all prompts begin with; the line of the prompt leaves them out.
    """
    first = next(one for one in found if one is not None)
    excerpt = " ".join(first.question[preamble:].split())[:_EXCERPT_CHARS]
    counts = [
        element("span", "-" if one is None else f"{one.num_correct}/{one.num_samples}")
        for one in found
    ]
    summary = element(
        "summary",
        element("span", f"{compared.position}", class_="position"),
        element("span", *counts, class_="counts"),
        element("span", excerpt or "(empty prompt)", class_="excerpt"),
    )
    facts = [("Ground truth", first.ground_truth or "-"), ("Data source", first.data_source or "-")]
    columns = [_column(label, one) for label, one in zip(labels, found, strict=True)]
    return element(
        "details",
        summary,
        element("dl", *(_fact(name, value) for name, value in facts)),
        element("pre", first.question),
        element("div", *columns, class_="answers"),
        class_=" ".join(["prompt", "group", *_marks(compared, found)]),
    )


def _marks(compared: ComparedPrompt, found: Sequence[ShownPrompt | None]) -> list[str]:
    """Return the classes by which the page's filter chooses."""
    known = [one for one in found if one is not None]
    marks = ["changed"] if compared.spread > 0 else []
    if all(one.num_correct == 0 for one in known):
        marks.append("wrong")
    if all(one.num_correct == one.num_samples for one in known):
        marks.append("right")
    return marks


def _column(label: str, prompt: ShownPrompt | None) -> Markup:
    if prompt is None:
        return element("div", element("h4", label), element("p", "Not sampled.", class_="hint"))
    count = f"{prompt.num_correct} of {prompt.num_samples} right"
    if len(prompt.samples) < prompt.num_samples:
        count += f", {len(prompt.samples)} shown"
    return element(
        "div",
        element("h4", label),
        element("p", count, class_="hint"),
        *(_response(index, sample) for index, sample in prompt.samples),
    )


def _response(index: int, sample: StoredSample) -> Markup:
    details = [f"{sample.tokens:,} tokens"]
    details += [f"{sample.turns} turns"] if sample.turns > 1 else []
    details += [f"ended by {sample.finish_reason}"] if sample.finish_reason else []
    details += [
        f"{name} {_value(value)}"
        for name, value in sample.metrics.items()
        if value is not None and not (name == "score" and value == sample.reward)
    ]
    details += [f"before: {_grade_text(one)}" for one in sample.earlier]
    verdict = "failure" if sample.reward is None else "success" if _is_right(sample) else "score"
    head = element(
        "p",
        f"{index} · ",
        element("span", _grade_text(sample.grade), class_=verdict),
        "".join(f" · {one}" for one in details),
        class_="head",
    )
    return joined(head, element("pre", sample.response))


def _fact(name: str, value: str) -> Markup:
    return element("div", element("dt", name), element("dd", value))


def _grade_text(grade: StoredGrade) -> str:
    if grade.reward is not None:
        return f"reward {grade.reward:g}"
    return f"no score: {shortened_middle(grade.failure or 'unknown', _FAILURE_CHARS)}"


def _value(value: float | str) -> str:
    return shortened_middle(value, _VALUE_CHARS) if isinstance(value, str) else f"{value:g}"


def _is_right(sample: StoredSample) -> bool:
    score = sample.scored
    return score is not None and is_correct(score)


def _shortened(sample: StoredSample) -> StoredSample:
    return msgspec.structs.replace(sample, response=shortened_middle(sample.response, _MOST_CHARS))


def _text(ground_truth: Any) -> str:  # noqa: ANN401 - any JSON
    if ground_truth is None:
        return ""
    return ground_truth if isinstance(ground_truth, str) else str(ground_truth)
