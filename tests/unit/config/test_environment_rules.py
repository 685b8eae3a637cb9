"""A run has one environment, and what does not fit it is refused with the remedy."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import environment_problems

TURNS = "actor_rollout_ref.rollout.multi_turn"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
PATH, SERVERS = "sluice.environment.path=a.py", "sluice.environment.addresses=[host:1]"
FUNCTIONS, CLASSES = f"{TURNS}.function_tool_path=f.py", f"{TURNS}.tool_config_path=t.yaml"


def found(*overrides: str) -> list[str]:
    return [one.text for one in environment_problems(load_config(None, list(overrides)))]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (PATH,),
        (SERVERS, f"{TURNS}.enable=true"),
        (FUNCTIONS, CLASSES, f"{TURNS}.enable=true"),
        (CLASSES, f"{LOOP}=tool_agent"),
    ],
)
def test_one_environment_is_accepted(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((PATH, SERVERS), "a run has one environment"),
        ((PATH, FUNCTIONS), "a run has one environment"),
        ((SERVERS, CLASSES), "a run has one environment"),
        ((f"{TURNS}.enable=true",), "without an environment"),
        ((f"{LOOP}=tool_agent",), "without an environment"),
        ((f"{LOOP}=mine",), "async def run(task, policy)"),
        (("sluice.environment.name=A",), "set sluice.environment.path"),
        ((PATH, "actor_rollout_ref.actor.router_replay.mode=R3"), "router_replay.mode"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], said: str) -> None:
    (problem,) = found(*overrides)
    assert said in problem
