"""Has a custom reward function loaded once before anything expensive starts."""

from __future__ import annotations

import json
import subprocess
import sys

from sluice.config.reward import RewardConfig
from sluice.errors import ConfigError, DeadlineError

COMMAND = ("-m", "services.reward.scorer_check")
TIMEOUT_S = 90.0  # above the check's own deadline


def check_reward_function(reward: RewardConfig) -> None:
    """Load the configured function in a process of its own, under a scorer's limits.

    Raises:
        ConfigError: it cannot be loaded; names file, function and the Python error.
        DeadlineError: loading does not end.
    """
    function = reward.custom_reward_function
    if function.path is None:
        return
    kwargs = json.dumps(function.reward_kwargs)
    command = [sys.executable, *COMMAND, function.path, function.name, kwargs]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError("custom reward function", "loading it", TIMEOUT_S) from error
    if ended.returncode != 0:
        raise ConfigError(ended.stderr.strip().removeprefix("sluice: ERROR "))
