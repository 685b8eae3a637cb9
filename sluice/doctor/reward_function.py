"""The reward function of the user's, loaded once as a scorer loads it."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem_of_sentence
from sluice.errors import SluiceError
from sluice.launch.reward_function_check import TIMEOUT_S, check_reward_function

DEADLINE_S = TIMEOUT_S + 5.0


def check_reward(examined: Examined) -> Iterator[Finding]:
    """Loads it in a process of its own, under a scorer's limits."""
    reward = examined.config.reward
    function = reward.custom_reward_function
    if function.path is None:
        model = reward.reward_model
        by = (
            f"the model at {model.base_url}" if model.enable else "built-in scorers, by data source"
        )
        yield fine(f"graded by {by}")
        return
    try:
        check_reward_function(reward)
    except SluiceError as error:
        yield problem_of_sentence(str(error), "the run refuses to start")
    else:
        yield fine(f"{function.path} defines {function.name}, and can be loaded")
