"""Whether a custom reward function can be loaded, found out before anything expensive starts.

``python -m services.reward.scorer_check PATH NAME [REWARD_KWARGS_AS_JSON]`` ends with exit code 0,
or with 1 and the reason on standard error: for launchers, which do not import services.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import msgspec

from services.reward.grading.messages import ScorerSetup
from services.reward.grading.worker import START_TIMEOUT_S, start_worker
from sluice.config.schema.reward import ScorerPoolConfig
from sluice.errors import SluiceError

DEFAULT_NAME = "compute_score"


def check_custom_function(
    path: str,
    name: str = DEFAULT_NAME,
    reward_kwargs: Mapping[str, object] | None = None,
    *,
    memory_mb: int | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Load the function in a process of its own, under a scorer's limits, and end the process.

    Args:
        path: ``reward.custom_reward_function.path``.
        name: the function's name.
        reward_kwargs: its further arguments; only their names are checked.
        memory_mb: ``reward.scorer_pool.memory_mb``; ``None``: its default.
        timeout_s: wall-clock limit.

    Raises:
        ConfigError: file, function or signature are wrong; names them and the Python error.
        DeadlineError: loading takes longer than `timeout_s`.
    """
    pool = ScorerPoolConfig()
    memory_bytes = (memory_mb or pool.memory_mb) * 2**20
    setup = ScorerSetup(path, name, reward_kwargs or {}, pool.timeout_s, memory_bytes)
    asyncio.run(_start_and_end(setup, timeout_s))


async def _start_and_end(setup: ScorerSetup, timeout_s: float) -> None:
    worker = await start_worker(setup, timeout_s=timeout_s)
    worker.kill()
    await worker.wait_ended()


def main(path: str, name: str = DEFAULT_NAME, reward_kwargs: str = "{}") -> int:
    """Return the command. Returns the exit code."""
    try:
        kwargs = msgspec.json.decode(reward_kwargs, type=dict[str, object])
        check_custom_function(path, name, kwargs)
    except (SluiceError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
