"""Scorers that grade the content of the last ``\\boxed{}``: MATH and multiple choice."""

from __future__ import annotations

from services.reward.grading.scorers.latex import braced_text, last_boxed, same_answer
from sluice.errors import DataError

_COMMAND = "\\boxed"
_SPACED = "\\boxed "
CHOICES = "ABCDEFG"


def math_score(solution: str, ground_truth: str) -> float:
    r"""Return 1 if the last ``\boxed{}`` is the reference answer, else 0 (verl's math_reward).

    Read the whole response, and compare both sides in their normal form. Keep verl's quirks, so
    that rewards are comparable: thousands separators are not removed, an ``\fbox`` never counts,
    and if ``\boxed 5`` (with a space) occurs anywhere, what follows its last occurrence is the
    answer.
    """
    answer = boxed_answer(solution)
    return float(answer is not None and same_answer(answer, ground_truth))


def boxed_answer(solution: str) -> str | None:
    """Return the answer as verl finds it; ``None`` if there is none."""
    if _SPACED in solution:
        return solution.rpartition(_SPACED)[2].partition("$")[0]
    start = solution.rfind(_COMMAND) + len(_COMMAND)
    if start < len(_COMMAND) or solution[start : start + 1] != "{":
        return None
    return braced_text(solution, start)


def choice_score(solution: str, ground_truth: str) -> float:
    """Return 1 if exactly the reference's letters are chosen, else 0; 0 without a box (DianJin-R1).

    Letters A to G count once and in any order; other characters do not count.

    Raises:
        DataError: the reference holds no letter, so a box without letters would be right.
    """
    reference = choice_letters(ground_truth)
    if not reference:
        raise DataError(
            f"ground_truth {ground_truth!r:.80} holds none of the letters {CHOICES}; repair the row"
        )
    boxed = last_boxed(solution)
    return float(boxed is not None and choice_letters(boxed) == reference)


def choice_letters(text: str) -> str:
    """Return the capital letters A to G that occur in `text`, in order."""
    return "".join(letter for letter in CHOICES if letter in text)
