"""The Geometry3K scorer: 0.9 for the answer and 0.1 for the form (verl's geo3k).

The form is ``<think>...</think>`` first and a ``\boxed{}`` after it. The result is one number, so
the metric ``acc`` holds the form as well, as in verl: a right answer in the wrong form is 0.9.
"""

from __future__ import annotations

from services.reward.grading.scorers.latex import last_boxed
from services.reward.grading.scorers.math_answer import same_value

FORM_SHARE = 0.1

_FORM_BEGINS = "<think>"
_FORM_REST = ("</think>", "\\boxed{", "}")


def compute_score(solution: str, ground_truth: str, *, form_share: float = FORM_SHARE) -> float:
    """``(1 - form_share) * right + form_share * well formed``, in [0, 1]."""
    answer = last_boxed(solution)
    right = answer is not None and same_value(answer.strip(), ground_truth)
    well_formed = has_form(solution)
    return (1.0 - form_share) * right + form_share * well_formed


def has_form(solution: str) -> bool:
    """Return whether the response begins with the thought and the other parts follow in order.

    Takes linear time: a pattern with as many gaps backtracks without end on repetitive text.
    """
    if not solution.startswith(_FORM_BEGINS):
        return False
    start = len(_FORM_BEGINS)
    for part in _FORM_REST:
        found = solution.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True
