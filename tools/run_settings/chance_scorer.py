"""A reward function for a model that knows nothing: right by the parity of the answer's checksum.

While a file `slow` lies beside it, it takes its time.
"""

import time
import zlib
from pathlib import Path

_SLOW = Path(__file__).with_name("slow")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **_: object
) -> dict[str, float]:
    """Return 0 or 1."""
    if _SLOW.exists():
        time.sleep(0.08)
    right = float(zlib.crc32(solution_str.encode()) & 1)
    return {"score": right, "acc": right}
