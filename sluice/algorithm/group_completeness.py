"""How many samples of a group must be left for it to be trained."""

from __future__ import annotations

import math

LEAST_SHARE = 0.5
LEAST_SAMPLES = 2
_SHARE_DIGITS = 9  # 0.56 * 25 is 14.000000000000002, and asks for 14 samples


def fewest_samples(n: int, *, whole_groups: bool, least_share: float = LEAST_SHARE) -> int:
    """Scored samples that make a group.

    Half of those drawn and, of several, two: with fewer, what is left would be another comparison
    than the one that was asked for.

    Args:
        n: samples drawn for a prompt, >= 1.
        whole_groups: no sample may be missing, since the loss compares all of a group's.
        least_share: of the samples drawn, in [`LEAST_SHARE`, 1]; a run may ask for more than half.
    """
    if whole_groups:
        return n
    return max(math.ceil(round(least_share * n, _SHARE_DIGITS)), min(LEAST_SAMPLES, n))
