"""The MATH scorer: is the last ``\boxed{}`` the reference answer? (verl's math_reward)

The whole response counts, and both sides are compared in their normal form. Quirks of verl are
kept, so that rewards compare: thousands separators are not removed, an ``\fbox`` never counts, and
if ``\boxed 5`` (with a space) occurs anywhere, what follows its last occurrence is the answer.
"""

from __future__ import annotations

from services.reward.grading.scorers.latex import braced, same_answer

_COMMAND = "\\boxed"
_SPACED = "\\boxed "


def compute_score(solution: str, ground_truth: str) -> float:
    """Return 1 if right, else 0."""
    answer = boxed_answer(solution)
    return float(answer is not None and same_answer(answer, ground_truth))


def boxed_answer(solution: str) -> str | None:
    """Return the answer as verl finds it; ``None`` if there is none."""
    if _SPACED in solution:
        return solution.rpartition(_SPACED)[2].partition("$")[0]
    start = solution.rfind(_COMMAND) + len(_COMMAND)
    if start < len(_COMMAND) or solution[start : start + 1] != "{":
        return None
    return braced(solution, start)
