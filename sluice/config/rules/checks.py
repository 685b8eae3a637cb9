"""All rules of a configuration, applied before anything heavy loads.

The schema holds the bounds of single fields. This module holds the rules between fields of services
and training; batch and parallel sizes are in `batch`, estimators and losses in `algorithm`, paths
in `files`. Every problem names the key, its value and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from msgspec import UNSET

from sluice.algorithm.episode_rules import SINGLE_TURN, TOOL_AGENT
from sluice.algorithm.registry import BOUNDED_FROM_BELOW
from sluice.config import derived
from sluice.config.addresses import bare_host, split_host_port
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.shape import ModelShape
from sluice.config.parallel_layout import divisions, shard_size, trainer_layout
from sluice.config.problems import Problem, errors, named, problem_of, raise_problems
from sluice.config.rules.algorithm import (
    algorithm_problems,
    correction_problems,
    idle_critic_problems,
)
from sluice.config.rules.batch import verl_problems
from sluice.config.rules.files import file_problems
from sluice.config.rules.guards import guard_problems
from sluice.config.rules.model import (
    REPLAY_KEY,
    context_problems,
    cut_problems,
    engine_problems,
    repeat_problems,
    routing_problems,
    shape_problems,
    stage_problems,
)
from sluice.config.rules.sampling import straggler_problems, strategy_problems, truncation_problems
from sluice.config.rules.sources import source_problems
from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorConfig
from sluice.config.schema.service import EndpointConfig, RolloutServiceConfig
from sluice.config.verl_sizes import ACTOR, ROLLOUT, largest_divisor, verl_sizes
from sluice.errors import ConfigError

_NO_PORT = {
    "port": "0 to have one chosen",
    "health_port": "0 for none",
    "metrics_port": "0 to have one chosen",
}
DEVICES = ("cpu", "cuda", "npu")
_SHORTEST_STALL_S = 1.0
_ENV, _TURNS = "sluice.environment", f"{ROLLOUT}.multi_turn"
_LOOP = f"{ROLLOUT}.agent.default_agent_loop"


def check_config(config: RunConfig) -> None:
    """Check relations between fields.

    Rules of verl that sluice does not need are not applied; see `all_problems`.

    Raises:
        ConfigError: lists every problem, each with its remedy.
    """
    raise_problems(relation_problems(config), "checks before the start")


def relation_problems(config: RunConfig) -> list[Problem]:
    """Return all contradictions between fields that prevent sluice from running."""
    return errors(all_problems(config, KeySettings(config), files=False))


def all_problems(
    config: RunConfig,
    settings: KeySettings,
    *,
    shape: ModelShape | None = None,
    files: bool = True,
) -> list[Problem]:
    """Return every broken rule: errors, and warnings for rules that only verl has.

    Args:
        settings: the keys as the user set them, including keys that only verl has.
        shape: the model's shape; without it rules about heads and experts are left out.
        files: also check the run's folders and its length.
    """
    if config.sluice.sources:
        check = partial(_rule_problems, settings=settings, shape=shape)
        problems = list(source_problems(config, check))
    else:
        problems = _rule_problems(config, settings, shape)
    problems += named("critic", idle_critic_problems(config, settings))
    if files:
        problems += named("files", file_problems(config))
    return problems


def _rule_problems(
    config: RunConfig, settings: KeySettings, shape: ModelShape | None
) -> list[Problem]:
    """Return the broken rules of a run without sources, or of one source."""
    sizes = verl_sizes(config, settings.of(config))
    problems = [*verl_problems(sizes), *engine_problems(sizes)]
    if shape is not None:
        problems += shape_problems(config, sizes, shape)
        for name, of_model in _OF_MODEL.items():
            problems += named(name, of_model(config, shape))
    for name, check in _CHECKS.items():
        problems += named(name, check(config))
    return problems


def _idle_ranks_problems(config: RunConfig) -> Iterator[Problem]:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    ranks, mini_rows = derived.world_size(config), actor.ppo_mini_batch_size * n
    workers, things = ranks, "trainer ranks"
    with suppress(ConfigError):  # `_parallel_layout_problems` says which size does not divide
        workers = trainer_layout(config, ranks).data_ranks
    if workers < ranks:
        things = f"groups of {ranks // workers} trainer ranks"
    if mini_rows < workers:
        yield Problem(
            f"{ACTOR}.ppo_mini_batch_size",
            actor.ppo_mini_batch_size,
            f"with {ROLLOUT}.n = {n}: a mini-batch of {mini_rows} rows leaves some of {workers} "
            f"{things} without work",
            "raise it or use fewer ranks",
        )


def _parallel_layout_problems(config: RunConfig) -> Iterator[Problem]:
    ranks = derived.world_size(config)
    sharding = config.actor_rollout_ref.actor.fsdp_config
    tensor, pipeline = sharding.tensor_parallel_size, sharding.pipeline_parallel_size
    peers = ranks // (tensor * pipeline)
    shard = sharding.fsdp_size if 0 < sharding.fsdp_size < peers else peers
    sizes = sharding.ulysses_sequence_parallel_size, sharding.expert_parallel_size
    for key, size, number, things in divisions(ranks, shard, *sizes, tensor, pipeline):
        if number % size:
            yield Problem(
                key,
                size,
                f"does not divide the {number} {things}",
                overrides=(f"{key}={largest_divisor(number, size)}",),
            )


def _critic_layout_problems(config: RunConfig) -> Iterator[Problem]:
    if not derived.uses_critic(config):
        return
    ranks, peers = derived.world_size(config), 1
    with suppress(ConfigError):  # `_parallel_layout_problems` names the policy's wrong size
        peers = trainer_layout(config, ranks).peers
    try:
        shard_size(config.critic.fsdp.fsdp_size, peers, ranks, "critic.fsdp.fsdp_size")
    except ConfigError as error:
        yield problem_of(error)


def _group_size_problems(config: RunConfig) -> Iterator[Problem]:
    n, max_n = config.actor_rollout_ref.rollout.n, config.sluice.rollout.max_n
    key, estimator = f"{ROLLOUT}.n", config.algorithm.adv_estimator
    if n == 1 and derived.advantage_estimator(config).needs_others:
        yield Problem(
            key,
            n,
            f"with algorithm.adv_estimator = {estimator}: a group of one has no advantage",
            "set n to 2 or more (8 and 16 are usual)",
        )
    elif n == 1 and config.algorithm.filter_groups.enable:
        yield Problem(
            key,
            n,
            "with algorithm.filter_groups.enable = true: samples of a group of one never differ",
            "set n to 2 or more, or switch the filter off",
        )
    for name, value in _group_sizes(config):
        if value > max_n:
            too_many = f"is more than sluice.rollout.max_n = {max_n}"
            yield Problem(name, value, too_many, "raise max_n")
    yield from group_capacity_problems(config)


def group_capacity_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield groups that a replica with this configuration refuses even when it is idle.

    A replica checks this too: it may be started with other settings than the run.
    """
    slots, waiting = config.actor_rollout_ref.rollout.max_num_seqs, config.sluice.rollout.max_queued
    for key, value in _group_sizes(config):
        if value > slots + waiting:
            yield Problem(
                key,
                value,
                f"is more than a replica takes: {ROLLOUT}.max_num_seqs = {slots} and "
                f"sluice.rollout.max_queued = {waiting} waiting",
                "raise one of these",
            )


def training_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of an evaluation, which a trainer refuses."""
    key = "sluice.rollout.serves_model_files"
    if config.sluice.rollout.serves_model_files:
        reads = ": replicas that read their weights from files are for an evaluation, not a trainer"
        yield Problem(key, True, reads, overrides=(f"{key}=false",))


def _group_sizes(config: RunConfig) -> tuple[tuple[str, int], ...]:
    rollout = config.actor_rollout_ref.rollout
    return (f"{ROLLOUT}.n", rollout.n), (f"{ROLLOUT}.val_kwargs.n", rollout.val_kwargs.n)


def _devices_problems(config: RunConfig) -> Iterator[Problem]:
    for key, value in (
        ("trainer.device", config.trainer.device),
        ("sluice.rollout.device", config.sluice.rollout.device),
    ):
        if value is not None and value not in DEVICES:
            yield Problem(key, value, "is unknown", f"choose from {', '.join(DEVICES)}")


def _clip_problems(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    used = (ActorConfig().clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high)
    if actor.clip_ratio not in used:
        yield Problem(
            f"{ACTOR}.clip_ratio",
            actor.clip_ratio,
            "has no effect while clip_ratio_low and clip_ratio_high are set",
            "set those two",
        )
    loss_mode = actor.policy_loss.loss_mode
    if loss_mode in BOUNDED_FROM_BELOW and actor.clip_ratio_low >= 1:
        yield Problem(
            f"{ACTOR}.clip_ratio_low",
            actor.clip_ratio_low,
            f": the lower bound of the ratio under the loss {loss_mode}, 1 - clip_ratio_low, must "
            "be positive",
            "set it below 1; DAPO uses 0.2",
        )


def _sampling_problems(config: RunConfig) -> Iterator[Problem]:
    rollout, needed_tokens = config.actor_rollout_ref.rollout, derived.max_row_tokens(config.data)
    if derived.max_model_len(config) < needed_tokens:
        yield Problem(
            f"{ROLLOUT}.max_model_len",
            rollout.max_model_len,
            f"cannot hold prompt and response of {needed_tokens} tokens",
            f"set it to at least {needed_tokens}, or to null",
        )
    top_ks = ((ROLLOUT, rollout.top_k), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs.top_k))
    for key, top_k in top_ks:
        if top_k != -1 and top_k < 1:
            yield Problem(f"{key}.top_k", top_k, ": expected -1 (off) or at least 1")


def _overlong_problems(config: RunConfig) -> Iterator[Problem]:
    shaping, limit = config.reward.reward_kwargs.overlong_buffer_cfg, derived.max_resp_len(config)
    key, manager = "reward.reward_kwargs.overlong_buffer_cfg", config.reward.reward_manager.name
    if not shaping.enable:
        return
    if manager != "dapo":
        yield Problem(
            f"{key}.enable",
            True,
            f"with reward.reward_manager.name = {manager} would have no effect",
            "set reward.reward_manager.name=dapo",
        )
    if not 0 < shaping.len <= limit:
        expected = f": expected 1 to the response limit of {limit} tokens"
        yield Problem(f"{key}.len", shaping.len, expected)
    if shaping.penalty_factor == 0:
        yield Problem(
            f"{key}.penalty_factor", 0, "would have no effect", "set it above 0; DAPO uses 1.0"
        )


def _validation_files_problems(config: RunConfig) -> Iterator[Problem]:
    trainer, no_files = config.trainer, "with data.val_files = null: there is nothing to validate"
    if config.data.val_files is None and trainer.test_freq > 0:
        remedy = "give val_files or set test_freq=-1"
        yield Problem("trainer.test_freq", trainer.test_freq, no_files, remedy)
    if config.data.val_files is None and trainer.val_only:
        yield Problem("trainer.val_only", True, no_files, "give val_files")
    if trainer.val_only and not trainer.val_before_train:
        yield Problem(
            "trainer.val_only",
            True,
            "with trainer.val_before_train = false would do nothing",
            "set val_before_train=true",
        )


def _reward_model_problems(config: RunConfig) -> Iterator[Problem]:
    model, key = config.reward.reward_model, "reward.reward_model"
    if model.enable and not model.base_url:
        yield Problem(
            f"{key}.base_url",
            model.base_url,
            f"with {key}.enable = true: sluice starts no server for a reward model",
            "start one with OpenAI's chat completions and give its address, or grade with "
            "reward.custom_reward_function",
        )
    if model.enable and not model.model_path:
        yield Problem(
            f"{key}.model_path",
            model.model_path,
            f"with {key}.enable = true",
            "give the model's name as its server knows it",
        )
    if model.min_score > model.max_score:
        above = f"is above max_score = {model.max_score:g}"
        yield Problem(f"{key}.min_score", model.min_score, above, "swap them")


def _profiler_problems(config: RunConfig) -> Iterator[Problem]:
    profiler, ranks = config.actor_rollout_ref.actor.profiler, derived.world_size(config)
    if not profiler.enable or profiler.all_ranks or not config.global_profiler.steps:
        return
    if not any(rank < ranks for rank in profiler.ranks):
        yield Problem(
            f"{ACTOR}.profiler.ranks",
            profiler.ranks,
            f"with {ACTOR}.profiler.enable = true names none of the trainer's {ranks} rank(s): "
            "no step would be traced",
            "set ranks=[0], or all_ranks=true",
        )


def _resume_problems(config: RunConfig) -> Iterator[Problem]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield Problem(
            "trainer.resume_from_path",
            None,
            "with trainer.resume_mode = resume_path",
            "name the folder global_step_N to resume from",
        )
    if mode != "resume_path" and path is not None:
        yield Problem(
            "trainer.resume_from_path",
            path,
            f"has no effect with trainer.resume_mode = {mode}",
            "set resume_mode=resume_path",
        )


def fixed_ports(rollout: RolloutServiceConfig) -> tuple[str, ...]:
    """Return the ports of replicas (``port``, ``health_port``, ...) that only one can have."""
    return tuple(key for key in _NO_PORT if getattr(rollout.endpoint, key))


def _endpoints_problems(config: RunConfig) -> Iterator[Problem]:
    services = config.sluice
    setting_of_address: dict[tuple[str, int], str] = {}
    for name, endpoint in (
        ("reward", services.reward.endpoint),
        ("trainer", services.trainer.endpoint),
        ("rollout", services.rollout.endpoint),
    ):
        for key in _NO_PORT:
            port = getattr(endpoint, key)
            address, setting = (endpoint.host, port), f"sluice.{name}.endpoint.{key}"
            if port and address in setting_of_address:
                remedy = f"give each its own port, or {_NO_PORT[key]}"
                yield Problem(setting, port, f"is taken by {setting_of_address[address]}", remedy)
            setting_of_address.setdefault(address, setting)
        yield from _advertised_problems(f"sluice.{name}.endpoint", endpoint)
    for key in fixed_ports(services.rollout):
        replicas, port = services.rollout.replicas, getattr(services.rollout.endpoint, key)
        if replicas > 1:
            yield Problem(
                f"sluice.rollout.endpoint.{key}",
                port,
                f"with sluice.rollout.replicas = {replicas}: all replicas would take one port",
                f"set it to {_NO_PORT[key]}",
            )


def _advertised_problems(key: str, endpoint: EndpointConfig) -> Iterator[Problem]:
    if endpoint.advertise is not None:
        try:
            split_host_port(endpoint.advertise)
        except ConfigError as error:
            yield Problem(f"{key}.advertise", UNSET, f": {error}")
    elif bare_host(endpoint.host) in {"0.0.0.0", "::"}:  # noqa: S104
        yield Problem(
            f"{key}.host",
            endpoint.host,
            "is no address that peers can reach",
            f"set {key}.advertise to host:port",
        )


def _draining_problems(config: RunConfig) -> Iterator[Problem]:
    drain_s, grace_s = config.sluice.rollout.drain_timeout_s, config.sluice.shutdown_grace_s
    if drain_s > grace_s:
        yield Problem(
            "sluice.rollout.drain_timeout_s",
            drain_s,
            f"is more than a service may take to end (sluice.shutdown_grace_s = {grace_s:g}), so "
            "a draining replica would be killed",
            "raise the latter",
        )


def _heartbeats_problems(config: RunConfig) -> Iterator[Problem]:
    trainer = config.sluice.trainer
    for key, consequence in (("replica_ttl_s", "drops"), ("replica_stall_s", "stalls")):
        seconds = getattr(trainer, key)
        if seconds < 2 * trainer.heartbeat_interval_s:
            yield Problem(
                f"sluice.trainer.{key}",
                seconds,
                "is less than two heartbeats (heartbeat_interval_s = "
                f"{trainer.heartbeat_interval_s:g}), so one late heartbeat {consequence} a replica",
                "raise it",
            )


def _watchdog_problems(config: RunConfig) -> Iterator[Problem]:
    watchdog = config.sluice.watchdog
    key, stall_s, give_up_s = "sluice.watchdog.stall_s", watchdog.stall_s, watchdog.give_up_s
    if stall_s is not None and stall_s < _SHORTEST_STALL_S:
        yield Problem(
            key,
            stall_s,
            ": a healthy service pauses that long",
            f"set it to {_SHORTEST_STALL_S:g} or more, or to null",
        )
    if stall_s is not None and give_up_s is not None and stall_s >= give_up_s:
        yield Problem(
            key,
            stall_s,
            f"is not below give_up_s = {give_up_s:g}: the process would end before its stall is "
            "reported",
            "lower stall_s, or raise give_up_s",
        )


def _message_size_problems(config: RunConfig) -> Iterator[Problem]:
    needed_mb, max_mb = derived.largest_message_mb(config), derived.message_mb(config)
    if needed_mb > max_mb:
        samples = derived.rows_per_batch(config)
        message = (
            f"is less than the {needed_mb} MiB that one sample, or the outline of a train batch of "
            f"{samples} samples, can reach"
        )
        overrides = ("sluice.max_message_mb=null",)
        yield Problem("sluice.max_message_mb", max_mb, message, "leave it out", overrides)
    images = config.sluice.limits.max_prompt_images_mb
    if images is not None and images > max_mb // 2:
        yield Problem(
            "sluice.limits.max_prompt_images_mb",
            images,
            f"is more than half of the {max_mb} MiB a message may have; the other half is for the "
            "prompt's text",
            f"lower it, or set sluice.max_message_mb = {2 * images}",
        )


def _routing_replay_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse R3 where the engine cannot return its routing."""
    rollout = config.actor_rollout_ref.rollout
    if not derived.replays_engine_routing(config):
        return
    key = REPLAY_KEY
    if rollout.name == "sglang":
        no_adapter = f"with {ROLLOUT}.name = sglang: its adapter does not return the experts"
        yield Problem(key, "R3", no_adapter, "set it to R2, which needs no engine", (f"{key}=R2",))
    elif rollout.name == "vllm" and not rollout.enable_prefix_caching:
        caching = f"{ROLLOUT}.enable_prefix_caching"
        only = f"with {key} = R3: vLLM returns its experts only with a prefix cache"
        yield Problem(caching, False, only, overrides=(f"{caching}=true",))


def environment_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of environments that contradict each other or other settings."""
    environment, turns = config.sluice.environment, config.actor_rollout_ref.rollout.multi_turn
    values = {
        f"{_ENV}.path": environment.path,
        f"{_ENV}.addresses": environment.addresses,
        f"{_ENV}.agents": environment.agents,
        f"{_TURNS}.function_tool_path": turns.function_tool_path,
        f"{_TURNS}.tool_config_path": turns.tool_config_path,
    }
    set_keys = {key: value for key, value in values.items() if value}
    if environment.name is not None and environment.path is None:
        yield Problem(f"{_ENV}.name", environment.name, "without a path", f"set {_ENV}.path")
    if not set_keys:
        yield from _without_environment_problems(config)
        return
    (key, value), *other_keys = set_keys.items()
    num_own = sum(key.startswith(_ENV) for key in set_keys)
    if num_own > 1 or 0 < num_own < len(set_keys):  # verl's two files make one environment
        yield Problem(
            key,
            value,
            f"with {' and '.join(name for name, _ in other_keys)}: a run has one environment",
            f"keep one of {_ENV}.path, {_ENV}.addresses, {_ENV}.agents and the tools of {_TURNS}",
        )
    if derived.replays_engine_routing(config):
        yield Problem(
            key,
            value,
            "with actor_rollout_ref.actor.router_replay.mode = R3: the experts that the engine "
            "chose are recorded for single answers",
            "set router_replay.mode to disabled or R2",
        )


def _without_environment_problems(config: RunConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    remedy = f"set {_ENV}.path, {_ENV}.addresses, {_ENV}.agents, or the tools of {_TURNS}"
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
            f"write the loop as async def run(task, policy), and set {_ENV}.path to its file",
        )


_CHECKS: Mapping[str, Callable[[RunConfig], Iterable[Problem]]] = {
    "idle-ranks": _idle_ranks_problems,
    "parallel-layout": _parallel_layout_problems,
    "critic-layout": _critic_layout_problems,
    "group-size": _group_size_problems,
    "devices": _devices_problems,
    "clip": _clip_problems,
    "sampling": _sampling_problems,
    "overlong": _overlong_problems,
    "validation-files": _validation_files_problems,
    "reward-model": _reward_model_problems,
    "profiler": _profiler_problems,
    "resume": _resume_problems,
    "endpoints": _endpoints_problems,
    "draining": _draining_problems,
    "heartbeats": _heartbeats_problems,
    "watchdog": _watchdog_problems,
    "message-size": _message_size_problems,
    "routing-replay": _routing_replay_problems,
    "cuts": cut_problems,
    "algorithm": algorithm_problems,
    "environment": environment_problems,
    "guards": guard_problems,
    "stragglers": straggler_problems,
    "sampling-strategy": strategy_problems,
    "truncated-training": truncation_problems,
    "correction": correction_problems,
}
_OF_MODEL: Mapping[str, Callable[[RunConfig, ModelShape], Iterable[Problem]]] = {
    "context": context_problems,
    "repeated-samples": repeat_problems,
    "routing": routing_problems,
    "stages": stage_problems,
}
