"""Multiple choice: do the letters in the last ``\boxed{}`` equal the reference's? (DianJin-R1)

Letters A to G count once and in any order; other characters do not count.
"""

from __future__ import annotations

from services.reward.grading.scorers.latex import last_boxed
from sluice.errors import DataError

CHOICES = "ABCDEFG"


def compute_score(solution: str, ground_truth: str) -> float:
    """Return 1 if exactly the reference's letters are chosen, else 0; without a box 0.

    Raises:
        DataError: the reference holds no letter; a box without letters would be right.
    """
    reference = chosen(ground_truth)
    if not reference:
        raise DataError(
            f"ground_truth {ground_truth!r:.80} holds none of the letters {CHOICES}; repair the row"
        )
    boxed = last_boxed(solution)
    return float(boxed is not None and chosen(boxed) == reference)


def chosen(text: str) -> str:
    """Return the capital letters A to G that occur in `text`, in order."""
    return "".join(letter for letter in CHOICES if letter in text)
