"""Train a tiny mixture of experts on one trainer rank and on four; `make quickstart-parallel`.

Four ranks are data-parallel over 2, Ulysses over 2 and expert parallel over 4. Both runs are whole
(`sluice quickstart --task experts`) and have the same model, data and seeds. The last line printed
is one JSON object. ``passed``: both learn, their held-out accuracies after the last step differ by
at most 2 points, and no prompt is lost. ``curves`` are (step, held-out accuracy);
`sluice dashboard runs/parallel/one --compare runs/parallel/four` draws them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import ROOT, empty_run_folder, print_report, quickstart
from sluice.report.run_record import AccuracyPoint, read_progress
from tools.phases import tool_parser

TASK = "experts"
RUNS = ("one", "four")
MOST_POINTS = 2.0
LEAST_GAIN = 0.5  # in held-out accuracy, so that two runs that learn nothing do not pass
Curve = Sequence[AccuracyPoint]


def main(arguments: Sequence[str]) -> int:
    """Train both; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.quickstart.parallel --seed 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "parallel")
    parsed = parser.parse_args(arguments)
    output: Path = parsed.output
    curves: dict[str, Curve] = {}
    report: dict[str, object] = {"seed": parsed.seed}
    lost = 0
    for ranks in RUNS:
        folder = output / ranks
        empty_run_folder(folder, output / f"assets-{parsed.seed}", TASK, parsed.seed)
        files = [
            f"@{Path(__file__).with_name(name)}.overrides"
            for name in ("parallel", f"parallel_{ranks}")
        ]
        summary = quickstart(folder, parsed.seed, ["--task", TASK, *files])
        curves[ranks] = read_progress(folder).accuracies()
        lost += summary["prompts_lost"]
        report[f"accuracy_{ranks}"] = summary["accuracy_after"]
        report[f"seconds_per_step_{ranks}"] = round(summary["seconds_dapo"] / summary["steps"], 2)
    report |= compared(curves["one"], curves["four"], lost)
    print_report(report, output)
    return 0 if report["passed"] else 1


def compared(one: Curve, four: Curve, prompts_lost: int) -> dict[str, object]:
    """Return both curves, the points between their ends, and whether the runs are alike."""
    points = 100 * abs(one[-1].accuracy - four[-1].accuracy)
    gain = min(curve[-1].accuracy - curve[0].accuracy for curve in (one, four))
    return {
        "difference_points": round(points, 2),
        "prompts_lost": prompts_lost,
        "passed": points <= MOST_POINTS and gain >= LEAST_GAIN and prompts_lost == 0,
        "curves": {
            name: [[point.step, round(point.accuracy, 4)] for point in curve]
            for name, curve in (("one", one), ("four", four))
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
