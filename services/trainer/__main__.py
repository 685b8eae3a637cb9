"""One trainer rank: `python -m services.trainer --config FILE [key=value ...]`.

Rank 0 serves gRPC and runs the loop; the others follow its commands. `sluice up` or torchrun starts
several ranks and numbers them in RANK and WORLD_SIZE.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from sluice.concurrency.process import (
    end_by_sigterm,
    end_with_supervisor,
    exit_status,
    run_and_exit,
    service_parser,
)
from sluice.config.derived import world_size
from sluice.config.loading.loader import load_config
from sluice.config.problems import raise_problems
from sluice.config.rules.checks import check_config, training_problems
from sluice.config.run import RunConfig
from sluice.device.host import prepare_process
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.trace_setup import trace_process


def main() -> int:
    """Run until the last step, SIGTERM or SIGINT.

    Exit code 0: the run reached its last step, or a `Stop` call ended it. After SIGTERM or SIGINT
    the run has shut down in order but is not complete, so the process then ends by that signal
    (in a shell: 128 plus its number).
    """
    end_with_supervisor()
    arguments = service_parser(
        "services.trainer", "Run one rank of the trainer.", "--config run.yaml trainer.save_freq=10"
    ).parse_args()
    rank = int(os.environ.get("RANK", "0"))
    return exit_status("trainer", lambda: _run(arguments.config, arguments.overrides, rank))


def _run(file: Path, overrides: list[str], rank: int) -> None:
    config = load_config(file, overrides)
    configure_logging("trainer" if rank == 0 else f"trainer-{rank}", config.sluice.log_level)
    # `sluice up` has checked this already; torchrun has not.
    check_config(config)
    raise_problems([*training_problems(config)], "start of the trainer")
    prepare_process(
        config,
        config.trainer.device,
        config.sluice.trainer.endpoint,
        collectives_on_device=world_size(config) > 1 or config.sluice.weights.backend != "gloo",
    )
    if rank > 0:
        from services.trainer.learner.rank_command import run_follower  # loads torch

        run_follower(config)
    elif not _run_traced(config):
        end_by_sigterm()


def _run_traced(config: RunConfig) -> bool:
    # Imported late: `--help` and a refused configuration need not load torch for 5 s.
    from services.trainer.leader import run_leader

    with trace_process(config, "trainer", "trainer"):
        return asyncio.run(run_leader(config))


if __name__ == "__main__":
    run_and_exit(main)
