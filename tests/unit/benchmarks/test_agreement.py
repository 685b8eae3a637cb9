"""What `benchmarks.trainer.agreement` reports of several models."""

from __future__ import annotations

from benchmarks.trainer.agreement import summary


def _times(own: float, theirs: float) -> dict[str, dict[str, float]]:
    return {"own": {"k3": own}, "transformers": {"k3": theirs}}


def test_ratios_are_those_of_the_worst_model_and_time() -> None:
    found = {
        "dense": {"before": _times(2.0, 2.0), "after": _times(1.0, 2.0)},
        "moe": {"before": _times(4.0, 5.0), "after": _times(6.0, 5.0)},
    }
    report = summary(found)
    assert (report["bf16_distance_ratio"], report["bf16_drift_ratio"]) == (1.2, 1.5)
    assert report["models"] == found
