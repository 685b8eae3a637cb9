"""Rules on `sluice.sources`: shares must add up, and one batch must be able to hold the settings
of all sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from msgspec import UNSET, structs

from sluice.algorithm.episode_rules import SINGLE_TURN, TOOL_AGENT
from sluice.config.derived import is_bypassed, uses_critic
from sluice.config.problems import Problem, errors, named
from sluice.config.run import RunConfig
from sluice.config.sources import SOURCES_KEY, source_configs, source_groups, source_shares

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SUM_TOLERANCE = 0.005  # three thirds of 0.333
_ROUNDING = 0.05


def source_problems(
    config: RunConfig, check_source: Callable[[RunConfig], list[Problem]]
) -> Iterator[Problem]:
    """Yield the problems that prevent the sources from training together, and every broken rule of
    their configurations. The run's own values break a rule only if every source has them.
    """
    yield from named("sources", _share_problems(config))
    yield from named("sources", _run_problems(config))
    without = structs.replace(config, sluice=structs.replace(config.sluice, sources={}))
    of_run, configs = check_source(without), source_configs(config)
    of_sources = {name: check_source(source_config) for name, source_config in configs.items()}
    shared = {problem.statement for problem in of_run}
    for problems in of_sources.values():
        shared &= {problem.statement for problem in problems}
    yield from (problem for problem in of_run if problem.statement in shared)
    for name, problems in of_sources.items():
        yield from named("sources", _name_problems(config, name))
        for problem in errors(problems):
            if problem.statement not in shared:
                message = f"{problem.message} (in {SOURCES_KEY}.{name})"
                yield replace(problem, message=message, overrides=())


def _name_problems(config: RunConfig, name: str) -> Iterator[Problem]:
    if not _NAME.fullmatch(name):
        remedy = "name it with up to 64 letters, digits and the signs _ . -"
        yield Problem(f"{SOURCES_KEY}.{name}", UNSET, "is no name that metrics can carry", remedy)
    yield from _environment_problems(config, name)


def _share_problems(config: RunConfig) -> Iterator[Problem]:
    shares, batch_size = source_shares(config), config.data.train_batch_size
    total = sum(shares.values())
    if abs(total - 1.0) > _SUM_TOLERANCE:
        terms = " + ".join(f"{share:g} ({name})" for name, share in shares.items())
        fitting = ", ".join(f"{name} {share / total:.4g}" for name, share in shares.items())
        yield Problem(
            SOURCES_KEY,
            UNSET,
            f"has shares that do not add up to 1: {terms} = {total:g}",
            f"give shares of every batch; in these proportions they are {fitting}",
        )
        return
    if len(shares) > batch_size:
        message = f"for {len(shares)} sources: every batch has a group of each"
        remedy = f"set it to {len(shares)} or more"
        yield Problem("data.train_batch_size", batch_size, message, remedy)
        return
    for name, num_groups in source_groups(config).items():
        exact = shares[name] / total * batch_size
        if abs(num_groups - exact) > _ROUNDING * exact:
            below, above = int(exact), int(exact) + 1
            fitting = " or ".join(f"{n / batch_size:.4g}" for n in (below, above) if n)
            yield Problem(
                f"{SOURCES_KEY}.{name}.share",
                shares[name],
                f"with data.train_batch_size = {batch_size}: that is {exact:.4g} groups of a "
                f"batch, and whole groups are {num_groups}, more than 5 % off",
                f"set the share to {fitting}, or train larger batches",
            )


def _run_problems(config: RunConfig) -> Iterator[Problem]:
    if config.data.train_files is not None:
        message = f"with {SOURCES_KEY}: each source has its own files"
        key, files = "data.train_files", config.data.train_files
        yield Problem(key, files, message, f"set it to null, or leave {SOURCES_KEY} out")
    if config.trainer.total_training_steps is None:
        message = f"with {SOURCES_KEY}: a source that ends begins again, so the run has no length"
        yield Problem("trainer.total_training_steps", None, message, "set it")
    if config.sluice.sampling.strategy == "rounds":
        message = f"with {SOURCES_KEY}: a wave is of one source"
        remedy = "set sluice.sampling.strategy=stream"
        yield Problem("sluice.sampling.strategy", "rounds", message, remedy)
    if config.algorithm.use_kl_in_reward:
        message = f"with {SOURCES_KEY}: the penalty has one weight for all rewards of a batch"
        remedy = "use the divergence in the loss: use_kl_loss and kl_loss_coef of each source"
        yield Problem("algorithm.use_kl_in_reward", True, message, remedy)
    configs = source_configs(config)
    if len({is_bypassed(source_config) for source_config in configs.values()}) > 1:
        names = ", ".join(
            name for name, source_config in configs.items() if is_bypassed(source_config)
        )
        message = f"has the loss bypass_mode in {names} alone: it needs other old logprobs"
        yield Problem(SOURCES_KEY, UNSET, message, "choose it for all sources, or for none")
    for name, source_config in configs.items():
        if uses_critic(source_config) != uses_critic(config):
            yield Problem(
                f"{SOURCES_KEY}.{name}.adv_estimator",
                source_config.algorithm.adv_estimator,
                f"with algorithm.adv_estimator = {config.algorithm.adv_estimator}: a critic learns "
                "from the rows of all sources, or there is none",
                "choose gae for the run and every source, or for none of them",
            )


def _environment_problems(config: RunConfig, name: str) -> Iterator[Problem]:
    agent_loop, environment = config.sluice.sources[name].environment, config.sluice.environment
    turns = config.actor_rollout_ref.rollout.multi_turn
    is_given = environment.path or environment.addresses or environment.agents
    has_tools = turns.function_tool_path or turns.tool_config_path
    if agent_loop in (None, SINGLE_TURN) or is_given or (agent_loop == TOOL_AGENT and has_tools):
        return
    key = f"{SOURCES_KEY}.{name}.environment"
    remedy = "set sluice.environment.path or sluice.environment.addresses"
    yield Problem(key, agent_loop, "without an environment that has it", remedy)
