"""The DAPO mathematics scorer: is the last ``Answer:`` line the reference answer?

Behaves like `verl/utils/reward_score/math_dapo.py`, quirks included, so that rewards are
comparable: units and some words are deleted even if they belong to the answer, a trailing full stop
is wrong, and only the end of a response counts.
"""

from __future__ import annotations

import re
from typing import TypedDict

from services.reward.grading.scorers.latex import last_boxed

SCORED_CHARACTERS = 300
BOXED_CHARACTERS = 100
NO_ANSWER = "[INVALID]"

_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_DELETED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *(r"\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITES = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # the text between the first two $
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class MathScore(TypedDict):
    """+1 or -1, whether the answer is right, and the extracted answer; `None` if a required box is
    missing."""

    score: float
    acc: bool
    pred: str | None


def compute_score(
    solution: str,
    ground_truth: str,
    *,
    strict_box_verify: bool = False,
    boxed_fallback: bool = True,
) -> MathScore:
    r"""Grade one response.

    Args:
        strict_box_verify: accept only the last ``\boxed{}``, without normalisation.
        boxed_fallback: without an ``Answer:`` line, look for a ``\boxed{}``, as verl's main branch
            does; if false, such a response is wrong, as in verl 0.6.
    """
    tail = solution[-SCORED_CHARACTERS:]
    boxed = last_boxed(tail[-BOXED_CHARACTERS:])
    line = normalize_answer(_last_answer_line(tail))
    if strict_box_verify or (boxed_fallback and line == NO_ANSWER and boxed is not None):
        prediction, is_right = boxed, boxed == ground_truth
    else:
        prediction, is_right = line, line == normalize_answer(ground_truth)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": prediction}


def normalize_answer(answer: str) -> str:
    """Strip units, spacing and LaTeX formatting, in verl's order."""
    answer = answer.split("=")[-1]
    for old, new in _SUBSTITUTIONS:
        answer = answer.replace(old, new)
    for word in _DELETED:
        answer = answer.replace(word, "")
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    if without_commas.isdigit():
        answer = without_commas
    return answer.strip()


def _last_answer_line(text: str) -> str:
    matches = _ANSWER_LINE.findall(text)
    return str(matches[-1]) if matches else NO_ANSWER
