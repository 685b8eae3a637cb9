"""Train a tiny mixture of experts on one trainer rank and on four; `make quickstart-parallel`.

Four ranks are data-parallel over 2, Ulysses over 2 and expert parallel over 4; with ``--against
stages`` they are two stages of two ranks that cut the layers. Both runs are whole (`sluice
quickstart --task experts`) and have the same model, data and seeds. The last line printed is one
JSON object. ``passed``: both learn, their held-out accuracies after the last step differ by at
most 2 points, and no prompt is lost. ``curves`` are (step, held-out accuracy);
`sluice dashboard runs/parallel/one --compare runs/parallel/four` draws them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import ROOT, empty_run_folder, print_report, quickstart
from sluice.report.run_record import AccuracyPoint, read_progress
from tools.phases import tool_parser

TASK = "experts"
AGAINST = ("four", "stages")
MAX_POINTS = 2.0
MIN_GAIN = 0.5  # in held-out accuracy, so that two runs that learn nothing do not pass
Curve = Sequence[AccuracyPoint]


def main(arguments: Sequence[str]) -> int:
    """Train both; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.quickstart.parallel --seed 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", choices=AGAINST, default="four", help="what one rank meets")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "parallel")
    parsed = parser.parse_args(arguments)
    output: Path = parsed.output
    report = {"seed": parsed.seed, **train_both(parsed.against, output, seed=parsed.seed)}
    print_report(report, output)
    return 0 if report["passed"] else 1


def train_both(
    against: str, output: Path, *, seed: int, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Train on one rank and on four; return the report.

    Args:
        against: layout of the four, of `AGAINST`.
        output: folder of both runs.
        seed: of model, data and samples.
        overrides: of both.
    """
    curves: dict[str, Curve] = {}
    report: dict[str, Any] = {}
    lost = 0
    for ranks in ("one", against):
        folder = output / ranks
        empty_run_folder(folder, output / f"assets-{seed}", TASK, seed)
        files = [
            f"@{Path(__file__).with_name(name)}.overrides"
            for name in ("parallel", f"parallel_{ranks}")
        ]
        summary = quickstart(folder, seed, ["--task", TASK, *files, *overrides])
        curves[ranks] = read_progress(folder).accuracies()
        lost += summary["prompts_lost"]
        report[f"accuracy_{ranks}"] = summary["accuracy_after"]
        report[f"seconds_per_step_{ranks}"] = round(summary["seconds_dapo"] / summary["steps"], 2)
    return report | compared(curves, lost)


def compared(curves: Mapping[str, Curve], prompts_lost: int) -> dict[str, object]:
    """Return both curves, the points between their ends, and whether the runs are alike."""
    ends = [curve[-1].accuracy for curve in curves.values()]
    points = 100 * (max(ends) - min(ends))
    gain = min(curve[-1].accuracy - curve[0].accuracy for curve in curves.values())
    return {
        "difference_points": round(points, 2),
        "gain": round(gain, 4),
        "prompts_lost": prompts_lost,
        "passed": points <= MAX_POINTS and gain >= MIN_GAIN and prompts_lost == 0,
        "curves": {
            name: [[point.step, round(point.accuracy, 4)] for point in curve]
            for name, curve in curves.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
