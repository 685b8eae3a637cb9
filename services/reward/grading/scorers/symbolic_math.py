"""Grade by mathematical equivalence with math-verify (optional; only this file loads it).

Replaces verl's prime_math on the Numina sources, and grades any source routed to it.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

from sluice.errors import DataError

PACKAGE = "math_verify"
EXTRA = "math-verify"


def check_installed(purpose: str) -> None:
    """Check that the package is installed.

    Raises:
        DataError: it is not installed; the error names `purpose` and the remedy.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise DataError(
            f"{purpose} needs the package math-verify, which is not installed; install "
            f"'sluice[{EXTRA}]' where the reward service runs, or set "
            "reward.custom_reward_function.path"
        )


def compute_score(solution: str, ground_truth: str) -> float:
    r"""Return 1 if the answer found in `solution` equals ``\boxed{ground_truth}``, else 0.

    Raises:
        DataError: math-verify is not installed.
        ValueError: the reference cannot be parsed, so that nothing could ever be right.
    """
    package = _package()
    reference = package.parse("\\boxed{" + ground_truth + "}", [package.LatexExtractionConfig()])
    if not reference:
        raise ValueError(f"math-verify cannot parse the reference {ground_truth!r:.200}")
    kinds = [package.ExprExtractionConfig(), package.LatexExtractionConfig()]
    return float(bool(package.verify(reference, package.parse(solution, kinds))))


@cache
def _package() -> Any:  # noqa: ANN401  it has no types
    check_installed("the scorer math_verify")
    return importlib.import_module(PACKAGE)
