"""Train the quickstart job by other algorithms than DAPO; `make bench-algorithms`.

Each starts from the same warm-started model and raises the held-out accuracy: PPO with a critic
(GAE), and GRPO with a divergence loss against the frozen starting model. The last line printed is
one JSON object with the accuracy before and after for each, and the seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import ROOT, print_report, quickstart
from tools.phases import tool_parser

ALGORITHMS = {file.stem: file for file in Path(__file__).parent.glob("*.overrides")}
FIGURES = ("accuracy_before", "accuracy_after", "seconds_dapo", "steps", "prompts_lost")


def main(arguments: Sequence[str]) -> int:
    """Run the chosen algorithms one after the other; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.algorithms --algorithms ppo_critic")
    parser.add_argument(
        "--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=sorted(ALGORITHMS)
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "algorithms")
    parsed = parser.parse_args(arguments)
    report: dict[str, object] = {"seed": parsed.seed}
    for name in parsed.algorithms:
        summary = quickstart(parsed.output / name, parsed.seed, [f"@{ALGORITHMS[name]}"])
        report[name] = {figure: summary[figure] for figure in FIGURES}
    return print_report(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
