"""Train the quickstart job by other algorithms than DAPO; `make bench-algorithms`.

Each starts from the same warm-started model and raises the held-out accuracy: PPO with a critic
(GAE), and GRPO with a divergence loss against the frozen starting model. The last line printed is
one JSON object with the accuracy before and after for each, and the seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.reporting import ROOT, print_report, quickstart

UNFILTERED = "algorithm.filter_groups.enable=false"
ALGORITHMS: Mapping[str, Sequence[str]] = {
    "ppo_critic": (
        UNFILTERED,
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=3.0e-3",
        "critic.fsdp.dtype=float32",
        "critic.ppo_max_token_len_per_gpu=5600",
        "sluice.asynchrony.max_staleness=0",
    ),
    "grpo_kl_loss": (
        UNFILTERED,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    ),
}
FIGURES = ("accuracy_before", "accuracy_after", "seconds_dapo", "steps", "prompts_lost")


def main(arguments: Sequence[str]) -> int:
    """Run the chosen algorithms one after the other; return the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        epilog="example: python -m benchmarks.algorithms --algorithms ppo_critic --seed 1",
    )
    parser.add_argument(
        "--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=sorted(ALGORITHMS)
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "algorithms")
    parsed = parser.parse_args(arguments)
    report: dict[str, object] = {"seed": parsed.seed}
    for name in parsed.algorithms:
        summary = quickstart(parsed.output / name, parsed.seed, ALGORITHMS[name])
        report[name] = {figure: summary[figure] for figure in FIGURES}
    return print_report(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
