"""Rules about environments: a run has one at most, and other keys must fit it."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.algorithm.episode_rules import SINGLE_TURN, TOOL_AGENT
from sluice.config.derived import replays_engine_routing
from sluice.config.problems import Problem
from sluice.config.run import RunConfig
from sluice.config.verl_sizes import ROLLOUT

_KEY, _TURNS = "sluice.environment", f"{ROLLOUT}.multi_turn"
_LOOP = f"{ROLLOUT}.agent.default_agent_loop"


def environment_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of environments that contradict each other, or other settings."""
    environment, turns = config.sluice.environment, config.actor_rollout_ref.rollout.multi_turn
    possible = {
        f"{_KEY}.path": environment.path,
        f"{_KEY}.addresses": environment.addresses,
        f"{_KEY}.agents": environment.agents,
        f"{_TURNS}.function_tool_path": turns.function_tool_path,
        f"{_TURNS}.tool_config_path": turns.tool_config_path,
    }
    given = {key: value for key, value in possible.items() if value}
    if environment.name is not None and environment.path is None:
        yield Problem(f"{_KEY}.name", environment.name, "without a path", f"set {_KEY}.path")
    if not given:
        yield from _without(config)
        return
    (key, value), *others = given.items()
    num_own = sum(key.startswith(_KEY) for key in given)
    if num_own > 1 or 0 < num_own < len(given):  # verl's two files make one environment
        yield Problem(
            key,
            value,
            f"with {' and '.join(other for other, _ in others)}: a run has one environment",
            f"keep one of {_KEY}.path, {_KEY}.addresses, {_KEY}.agents and the tools of {_TURNS}",
        )
    if replays_engine_routing(config):
        yield Problem(
            key,
            value,
            "with actor_rollout_ref.actor.router_replay.mode = R3: the experts that the engine "
            "chose are recorded for single answers",
            "set router_replay.mode to disabled or R2",
        )


def _without(config: RunConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    remedy = f"set {_KEY}.path, {_KEY}.addresses, {_KEY}.agents, or the tools of {_TURNS}"
    if rollout.multi_turn.enable:
        message = "without an environment: there is nothing to call and nobody to answer"
        yield Problem(f"{_TURNS}.enable", True, message, remedy)
    if rollout.agent.default_agent_loop == TOOL_AGENT:
        yield Problem(_LOOP, TOOL_AGENT, "without an environment", remedy)
    elif rollout.agent.default_agent_loop != SINGLE_TURN:
        yield Problem(
            _LOOP,
            rollout.agent.default_agent_loop,
            f"is none of {SINGLE_TURN}, {TOOL_AGENT}",
            f"write the loop as async def run(task, policy), and set {_KEY}.path to its file",
        )
