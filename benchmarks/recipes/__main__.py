"""Train every recipe in small, and see that each learns; `make bench-recipes`.

The last line printed is one JSON object: for each recipe the seconds of the whole command, from
making model and data to the last process's end, and the held-out accuracy before and after. The
exit status is 1 if a run fails, gains less than 0.15 or loses a prompt.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import ROOT, print_line, print_report
from sluice.recipes.folders import all_recipes
from tools.phases import tool_parser

MIN_GAIN = 0.15  # in held-out accuracy


def main(arguments: Sequence[str]) -> int:
    """Train the chosen recipes one after the other; return the exit status."""
    names = [recipe.name for recipe in all_recipes() if recipe.tiny.is_file()]
    parser = tool_parser(__doc__, "python -m benchmarks.recipes --recipes dapo-qwen3-32b-npu")
    parser.add_argument("--recipes", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "recipes")
    parsed = parser.parse_args(arguments)
    report = {
        name: trained(name, parsed.output / f"{name}-{parsed.seed}", parsed.seed)
        for name in parsed.recipes
    }
    print_report(report)
    return 0 if all(map(has_learned, report.values())) else 1


def trained(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train a recipe in small; return its figures, or how it failed."""
    command = [sys.executable, "-m", "sluice.cli.main", "recipe", "run", name, "--tiny"]
    command += ["--seed", str(seed), "--run", str(folder)]
    print_line(" ".join(command[3:]))
    ended = subprocess.run(command, cwd=ROOT, check=False)
    if ended.returncode != 0:
        return {"failed": f"exit code {ended.returncode}"}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "seconds": round(summary["seconds_total"], 1),
        "before": round(summary["accuracy_before"], 4),
        "after": round(summary["accuracy_after"], 4),
        "prompts_lost": summary["prompts_lost"],
    }


def has_learned(figures: dict[str, Any]) -> bool:
    """Return whether a run reached its end, lost nothing and gained enough."""
    if "failed" in figures:
        return False
    gain: float = figures["after"] - figures["before"]
    return gain >= MIN_GAIN and figures["prompts_lost"] == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
