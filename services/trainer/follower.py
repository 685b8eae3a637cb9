"""Trainer ranks above 0: the same learner, driven by rank 0."""

from __future__ import annotations

import json

import torch

from services.trainer.learner.parallel import DataParallel, SingleProcess, TorchDistributed
from services.trainer.learner.rank_command import follow
from services.trainer.learner.worker import Learner
from sluice.concurrency.garbage import exempt_start_up
from sluice.config.derived import world_size
from sluice.config.run import RunConfig
from sluice.device.select import select_device

REWARD_START_TIMEOUT_S = 120.0


def join_ranks(config: RunConfig) -> DataParallel:
    """This rank's place among all trainer ranks."""
    torch.set_num_threads(config.sluice.trainer.torch_threads)
    if world_size(config) == 1:
        return SingleProcess()
    device = select_device(config.trainer.device)
    timeout_s = config.sluice.trainer.command_timeout_s
    # Rank 0 comes only when the reward service has answered.
    return TorchDistributed(device, timeout_s, REWARD_START_TIMEOUT_S + timeout_s)


def share_total_steps(parallel: DataParallel, total_steps: int | None) -> int:
    """Tells all ranks how long the run is; rank 0 gives the number, the others None. Collective."""
    payload = None if total_steps is None else json.dumps(total_steps).encode()
    return int(json.loads(parallel.broadcast_bytes(payload, "sharing the length of the run")))


def run_follower(config: RunConfig) -> None:
    """Follows rank 0 to the end of the run."""
    parallel = join_ranks(config)
    try:
        learner = Learner(config, parallel, share_total_steps(parallel, None))
        exempt_start_up()
        follow(learner, parallel)
    finally:
        parallel.close()
