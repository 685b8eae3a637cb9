"""Check what the fields of a configuration mean to each other, before anything heavy loads.

Bounds of single fields are the schema's; batch and parallel sizes are `verl_rules`', files and
folders `file_checks`'. Every sentence names the keys, their values and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sluice.algorithm.registry import BATCH_ESTIMATORS, BOUNDED_FROM_BELOW, POLICY_OBJECTIVES
from sluice.config import derived
from sluice.config.addresses import bare_host, split_host_port
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.shape import ModelShape
from sluice.config.problems import Violation, raise_problems
from sluice.config.rules.algorithm import algorithm_problems, correction_violations
from sluice.config.rules.batch import verl_violations
from sluice.config.rules.files import file_problems
from sluice.config.rules.model import engine_violations, shape_violations
from sluice.config.rules.sampling import straggler_problems, strategy_problems
from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorConfig
from sluice.config.schema.rollout import ENGINES
from sluice.config.schema.service import MOST_MESSAGE_MB, EndpointConfig, RolloutServiceConfig
from sluice.config.verl_run import ACTOR, ROLLOUT, verl_run
from sluice.errors import ConfigError

_NO_PORT = {
    "port": "0 to have one chosen",
    "health_port": "0 for none",
    "metrics_port": "0 to have one chosen",
}
DEVICES = ("cpu", "cuda", "npu")
_SHORTEST_STALL_S = 1.0
_NEEDS_OTHERS = ("grpo_passk", "rloo_vectorized", "adpo")  # the others keep a lone raw reward


def check_config(config: RunConfig, *, files: bool = True) -> None:
    """Checks relations between fields and, with `files`, that what they name exists.

    Rules of verl's that sluice does without are not applied: see `violations`.

    Raises:
        ConfigError: lists every violation, each with its remedy.
    """
    problems = [*relation_problems(config), *_engine(config)]
    if files:
        problems += file_problems(config)
    raise_problems(problems, "checks before the start")


def _engine(config: RunConfig) -> Iterator[str]:
    """Refused before replicas start and refuse it; `violations` leaves the launch of a cluster
    with another engine alone, whose other rules are worth knowing."""
    name = config.actor_rollout_ref.rollout.name
    if name not in ENGINES:
        yield (
            f"{ROLLOUT}.name = {name!r}: replicas of this version run {', '.join(ENGINES)} only; "
            f"set {ROLLOUT}.name=torch"
        )


def relation_problems(config: RunConfig) -> list[str]:
    """All contradictions between fields that keep sluice from running."""
    broken = violations(config, KeySettings(config), files=False)
    return [one.text for one in broken if one.here]


def violations(
    config: RunConfig,
    settings: KeySettings,
    *,
    shape: ModelShape | None = None,
    files: bool = True,
) -> list[Violation]:
    """Every broken rule, sluice's and verl's.

    Args:
        settings: the keys as the user set them, those of verl's alone included.
        shape: the model's; without it rules about heads and experts are left out.
        files: whether what the configuration names must be there.
    """
    run = verl_run(config, settings)
    broken = [*verl_violations(run), *engine_violations(run)]
    if shape is not None:
        broken += shape_violations(run, shape)
    broken += [Violation(_name(check), text) for check in _CHECKS for text in check(config)]
    broken += [Violation("algorithm", text) for text in algorithm_problems(config)]
    broken += [Violation("stragglers", text) for text in straggler_problems(config)]
    broken += [Violation("sampling-strategy", text) for text in strategy_problems(config)]
    broken += [*correction_violations(config), *_message_size(config)]
    if files:
        broken += [Violation("files", text) for text in file_problems(config)]
    return broken


def _name(check: Callable[[RunConfig], Iterator[str]]) -> str:
    return check.__name__.strip("_").replace("_", "-")


def _idle_ranks(config: RunConfig) -> Iterator[str]:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    ranks, mini_rows = derived.world_size(config), actor.ppo_mini_batch_size * n
    if mini_rows < ranks:
        yield (
            f"a mini-batch of {mini_rows} rows ({ACTOR}.ppo_mini_batch_size * {ROLLOUT}.n) leaves "
            f"some of {ranks} trainer ranks without work; raise it or use fewer ranks"
        )


def _group_size(config: RunConfig) -> Iterator[str]:
    n, most = config.actor_rollout_ref.rollout.n, config.sluice.rollout.max_n
    estimator = config.algorithm.adv_estimator
    if n == 1 and estimator in _NEEDS_OTHERS:
        yield (
            f"{ROLLOUT}.n = 1 with algorithm.adv_estimator = {estimator}: a group of one has no "
            "advantage; set n to 2 or more (8 and 16 are usual)"
        )
    elif n == 1 and config.algorithm.filter_groups.enable:
        yield (
            f"{ROLLOUT}.n = 1 with algorithm.filter_groups.enable: a group of one never differs "
            "within itself; set n to 2 or more, or switch the filter off"
        )
    for key, value in _group_sizes(config):
        if value > most:
            yield f"{key} = {value} is more than sluice.rollout.max_n = {most}; raise max_n"
    yield from group_capacity_problems(config)


def group_capacity_problems(config: RunConfig) -> Iterator[str]:
    """Groups that a replica with this configuration refuses even when it is idle.

    A replica asks, too: it may be started with other settings than the run.
    """
    slots, waiting = config.actor_rollout_ref.rollout.max_num_seqs, config.sluice.rollout.max_queued
    for key, value in _group_sizes(config):
        if value > slots + waiting:
            yield (
                f"{key} = {value} is more than a replica takes: {ROLLOUT}.max_num_seqs = {slots} "
                f"and sluice.rollout.max_queued = {waiting} waiting; raise one of these"
            )


def _group_sizes(config: RunConfig) -> tuple[tuple[str, int], ...]:
    rollout = config.actor_rollout_ref.rollout
    return (f"{ROLLOUT}.n", rollout.n), (f"{ROLLOUT}.val_kwargs.n", rollout.val_kwargs.n)


def _names(config: RunConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    for key, value, known in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, BATCH_ESTIMATORS),
        (f"{ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, POLICY_OBJECTIVES),
        ("trainer.device", config.trainer.device, DEVICES),
        ("sluice.rollout.device", config.sluice.rollout.device, DEVICES),
    ):
        if value is not None and value not in known:
            yield f"{key} = {value!r} is unknown; known: {', '.join(known)}"


def _clip(config: RunConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    used = (ActorConfig().clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high)
    if actor.clip_ratio not in used:
        yield (
            f"{ACTOR}.clip_ratio = {actor.clip_ratio} has no effect while clip_ratio_low and "
            "clip_ratio_high are set; set those two"
        )
    loss_mode = actor.policy_loss.loss_mode
    if loss_mode in BOUNDED_FROM_BELOW and actor.clip_ratio_low >= 1:
        yield (
            f"{ACTOR}.clip_ratio_low = {actor.clip_ratio_low}: the lower bound of the ratio under "
            f"the loss {loss_mode}, 1 - clip_ratio_low, must be positive; DAPO uses 0.2"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout, needed = config.actor_rollout_ref.rollout, derived.max_row_tokens(config.data)
    if derived.max_model_len(config) < needed:
        yield (
            f"{ROLLOUT}.max_model_len = {rollout.max_model_len} cannot hold prompt and response of "
            f"{needed} tokens; set it to at least {needed}, or to null"
        )
    top_ks = ((ROLLOUT, rollout.top_k), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs.top_k))
    for key, top_k in top_ks:
        if top_k != -1 and top_k < 1:
            yield f"{key}.top_k = {top_k}: expected -1 (off) or at least 1"


def _optimizer(config: RunConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if not all(0 <= beta < 1 for beta in actor.optim.betas):
        yield f"{ACTOR}.optim.betas = {list(actor.optim.betas)}: expected two numbers in [0, 1)"
    if actor.loss_scale_factor is not None and actor.loss_scale_factor < 1:
        yield f"{ACTOR}.loss_scale_factor = {actor.loss_scale_factor}: expected at least 1 or null"


def _overlong(config: RunConfig) -> Iterator[str]:
    shaping, limit = config.reward.reward_kwargs.overlong_buffer_cfg, derived.max_resp_len(config)
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    if not shaping.enable:
        return
    if config.reward.reward_manager.name != "dapo":
        yield (
            f"{key}.enable with reward.reward_manager.name = "
            f"{config.reward.reward_manager.name} would have no effect; use the manager dapo"
        )
    if not 0 < shaping.len <= limit:
        yield f"{key}.len = {shaping.len}: expected 1 to the response limit of {limit} tokens"
    if shaping.penalty_factor == 0:
        yield f"{key}.penalty_factor = 0 would have no effect; DAPO uses 1.0"


def _validation_files(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if config.data.val_files is None and trainer.test_freq > 0:
        yield (
            f"trainer.test_freq = {trainer.test_freq} with data.val_files = null: there is "
            "nothing to validate on; give val_files or set test_freq=-1"
        )
    if config.data.val_files is None and trainer.val_only:
        yield (
            "trainer.val_only = true with data.val_files = null: there is nothing to validate on; "
            "give val_files"
        )
    if trainer.val_only and not trainer.val_before_train:
        yield (
            "trainer.val_only = true with trainer.val_before_train = false would do nothing; set "
            "val_before_train=true"
        )


def _reward_model(config: RunConfig) -> Iterator[str]:
    model, key = config.reward.reward_model, "reward.reward_model"
    if model.enable and not model.base_url:
        yield (
            f"{key}.enable = true with {key}.base_url = null: sluice starts no server for a reward "
            "model; start one with OpenAI's chat completions and give its address, or grade with "
            "reward.custom_reward_function"
        )
    if model.enable and not model.model_path:
        yield (
            f"{key}.enable = true with {key}.model_path = null: give the model's name as its "
            "server knows it"
        )
    if model.min_score > model.max_score:
        yield (
            f"{key}.min_score = {model.min_score:g} is above max_score = {model.max_score:g}; swap "
            "them"
        )


def _resume(config: RunConfig) -> Iterator[str]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_mode = resume_path needs trainer.resume_from_path, the folder "
            "global_step_N to go on from"
        )
    if mode != "resume_path" and path is not None:
        yield (
            f"trainer.resume_from_path = {path!r} has no effect with trainer.resume_mode = {mode}; "
            "set resume_mode=resume_path"
        )


def fixed_ports(rollout: RolloutServiceConfig) -> tuple[str, ...]:
    """Which ports of replicas (``port``, ``health_port``, ...) only one replica can have."""
    return tuple(key for key in _NO_PORT if getattr(rollout.endpoint, key))


def _endpoints(config: RunConfig) -> Iterator[str]:
    services = config.sluice
    taken: dict[tuple[str, int], str] = {}
    for name, endpoint in (
        ("reward", services.reward.endpoint),
        ("trainer", services.trainer.endpoint),
        ("rollout", services.rollout.endpoint),
    ):
        for key in _NO_PORT:
            port = getattr(endpoint, key)
            where, setting = (endpoint.host, port), f"sluice.{name}.endpoint.{key}"
            if port and where in taken:
                yield (
                    f"{setting} = {port} taken by {taken[where]}; give each its own port, or "
                    f"{_NO_PORT[key]}"
                )
            taken.setdefault(where, setting)
        yield from _advertised(f"sluice.{name}.endpoint", endpoint)
    for key in fixed_ports(services.rollout):
        replicas, port = services.rollout.replicas, getattr(services.rollout.endpoint, key)
        if replicas > 1:
            yield (
                f"sluice.rollout.endpoint.{key} = {port} with sluice.rollout.replicas = "
                f"{replicas}: all replicas would take one port; set it to {_NO_PORT[key]}"
            )


def _advertised(key: str, endpoint: EndpointConfig) -> Iterator[str]:
    if endpoint.advertise is not None:
        try:
            split_host_port(endpoint.advertise)
        except ConfigError as error:
            yield f"{key}.advertise: {error}"
    elif bare_host(endpoint.host) in {"0.0.0.0", "::"}:  # noqa: S104
        yield (
            f"{key}.host = {endpoint.host} is no address that peers can reach; set "
            f"{key}.advertise to host:port"
        )


def _draining(config: RunConfig) -> Iterator[str]:
    drain_s, grace_s = config.sluice.rollout.drain_timeout_s, config.sluice.shutdown_grace_s
    if drain_s > grace_s:
        yield (
            f"sluice.rollout.drain_timeout_s = {drain_s:g} is more than a service may take to end "
            f"(sluice.shutdown_grace_s = {grace_s:g}), so a draining replica would be killed; "
            "raise the latter"
        )


def _heartbeats(config: RunConfig) -> Iterator[str]:
    trainer = config.sluice.trainer
    for key, consequence in (("replica_ttl_s", "drops"), ("replica_stall_s", "stalls")):
        seconds = getattr(trainer, key)
        if seconds < 2 * trainer.heartbeat_interval_s:
            yield (
                f"sluice.trainer.{key} = {seconds:g} is less than two heartbeats "
                f"(heartbeat_interval_s = {trainer.heartbeat_interval_s:g}), so one late heartbeat "
                f"{consequence} a replica; raise it"
            )


def _watchdog(config: RunConfig) -> Iterator[str]:
    watchdog = config.sluice.watchdog
    stall_s, give_up_s = watchdog.stall_s, watchdog.give_up_s
    if stall_s is not None and stall_s < _SHORTEST_STALL_S:
        yield (
            f"sluice.watchdog.stall_s = {stall_s:g}: a healthy service pauses that long; set it to "
            f"{_SHORTEST_STALL_S:g} or more, or to null"
        )
    if stall_s is not None and give_up_s is not None and stall_s >= give_up_s:
        yield (
            f"sluice.watchdog.stall_s = {stall_s:g} is not below give_up_s = {give_up_s:g}: the "
            "process would end before anything is told of its stall; lower stall_s, or raise "
            "give_up_s"
        )


def _message_size(config: RunConfig) -> Iterator[Violation]:
    needed, most = derived.largest_batch_mb(config), derived.message_mb(config)
    batch = f"a train batch of {derived.rows_per_batch(config)} rows can reach"
    if needed > MOST_MESSAGE_MB:
        yield Violation(
            "message-size",
            f"the {needed} MiB {batch} are more than a message can hold ({MOST_MESSAGE_MB} MiB); "
            "lower data.train_batch_size or data.max_response_length",
        )
    elif needed > most:
        yield Violation(
            "message-size",
            f"sluice.max_message_mb = {most} is less than the {needed} MiB {batch}; leave it out",
            ("sluice.max_message_mb=null",),
        )
    images = config.sluice.limits.max_prompt_images_mb
    if images is not None and images > most // 2:
        yield Violation(
            "message-size",
            f"sluice.limits.max_prompt_images_mb = {images} is more than half of the {most} MiB a "
            f"message may have, the rest of which is for the prompt's text; lower it, or set "
            f"sluice.max_message_mb = {2 * images}",
        )


_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _idle_ranks,
    _group_size,
    _names,
    _clip,
    _sampling,
    _optimizer,
    _overlong,
    _validation_files,
    _reward_model,
    _resume,
    _endpoints,
    _draining,
    _heartbeats,
    _watchdog,
)
