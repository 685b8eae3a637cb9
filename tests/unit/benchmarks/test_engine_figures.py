"""What `benchmarks.devices.engines` makes of its runs."""

from __future__ import annotations

from benchmarks.devices.engines import LEAST, MOST, figures
from benchmarks.parts import missed


def _runs(cpu_us: float, *seconds: float) -> list[dict[str, float]]:
    tokens = 1000
    return [{"tokens": tokens, "seconds": one, "cpu_s": tokens * cpu_us / 1e6} for one in seconds]


def test_what_vllm_costs_alone_counts_on_neither_side_of_the_ratio() -> None:
    found = {
        "alone": _runs(20.0, 1.0, 2.0, 4.0),
        "now": _runs(25.0, 1.25, 2.0, 5.0),
        "before": _runs(60.0, 2.0, 4.0, 8.0),
    }
    report = figures(found)
    assert report["vllm_python_ratio"] == 0.125
    assert report["vllm_overhead"] == 0.8, "the median of neighbouring runs"
    assert missed(report, MOST, LEAST) == ["vllm_overhead"]
    assert missed(report | {"vllm_python_ratio": float("nan")}, MOST, LEAST) == [
        "vllm_python_ratio",
        "vllm_overhead",
    ]
    assert missed(dict.fromkeys(report), MOST, LEAST) == []
