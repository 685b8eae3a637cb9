"""Checks what the fields of a configuration mean to each other, before anything heavy loads.

Bounds of single fields are the schema's; files and folders are `file_checks`'. Every sentence
names the keys, their values and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sluice.algorithm.advantages.registry import ADVANTAGE_ESTIMATORS
from sluice.algorithm.losses.registry import POLICY_LOSSES
from sluice.config import derived
from sluice.config.actor_rollout_ref import ActorConfig
from sluice.config.file_checks import file_problems
from sluice.config.problems import raise_problems
from sluice.config.run import RunConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DEVICES = ("cpu", "cuda", "npu")


def check_config(config: RunConfig, *, files: bool = True) -> None:
    """Checks relations between fields and, with `files`, that what they name exists.

    Raises:
        ConfigError: lists every violation, each with its remedy.
    """
    problems = relation_problems(config)
    if files:
        problems += file_problems(config)
    raise_problems(problems, "checks before the start")


def relation_problems(config: RunConfig) -> list[str]:
    """All contradictions between fields."""
    return [problem for check in _CHECKS for problem in check(config)]


def _batch_sizes(config: RunConfig) -> Iterator[str]:
    batch = config.data.train_batch_size
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mini = actor.ppo_mini_batch_size
    if mini > batch:
        yield (
            f"{ACTOR}.ppo_mini_batch_size = {mini} is more than data.train_batch_size = {batch} "
            f"(both count prompts); set it to {batch} or to a divisor of it"
        )
    elif batch % mini:
        yield (
            f"data.train_batch_size = {batch} is no multiple of {ACTOR}.ppo_mini_batch_size = "
            f"{mini}, so the last mini-batch would be smaller; choose a divisor of {batch}"
        )
    ranks, mini_rows = derived.world_size(config), mini * rollout.n
    if mini_rows < ranks:
        yield (
            f"a mini-batch of {mini_rows} rows ({ACTOR}.ppo_mini_batch_size * {ROLLOUT}.n) leaves "
            f"some of {ranks} trainer ranks without work; raise it or use fewer ranks"
        )


def _micro_batches(config: RunConfig) -> Iterator[str]:
    actor, longest = config.actor_rollout_ref.actor, derived.max_row_tokens(config.data)
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu is null while {ACTOR}.use_dynamic_bsz is false; "
            "set the rows of a micro-batch, or use_dynamic_bsz=true for a token budget"
        )
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield (
            f"{ACTOR}.ppo_max_token_len_per_gpu = {actor.ppo_max_token_len_per_gpu} cannot hold "
            f"the longest row of {longest} tokens (data.max_prompt_length + "
            f"data.max_response_length); set it to at least {longest}"
        )


def _group_size(config: RunConfig) -> Iterator[str]:
    n, most = config.actor_rollout_ref.rollout.n, config.sluice.rollout.max_n
    if n == 1 and config.algorithm.adv_estimator == "grpo":
        yield (
            f"{ROLLOUT}.n = 1 with algorithm.adv_estimator = grpo: a group of one has no "
            "advantage; set n to 2 or more (8 and 16 are usual)"
        )
    elif n == 1 and config.algorithm.filter_groups.enable:
        yield (
            f"{ROLLOUT}.n = 1 with algorithm.filter_groups.enable: a group of one never differs "
            "within itself; set n to 2 or more, or switch the filter off"
        )
    for key, value in ((f"{ROLLOUT}.n", n), (f"{ROLLOUT}.val_kwargs.n", _validation_n(config))):
        if value > most:
            yield f"{key} = {value} is more than sluice.rollout.max_n = {most}; raise max_n"


def _validation_n(config: RunConfig) -> int:
    return config.actor_rollout_ref.rollout.val_kwargs.n


def _names(config: RunConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    for key, value, known in (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ADVANTAGE_ESTIMATORS),
        (f"{ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, POLICY_LOSSES),
        ("trainer.device", config.trainer.device, DEVICES),
        ("sluice.rollout.device", config.sluice.rollout.device, DEVICES),
    ):
        if value is not None and value not in known:
            yield f"{key} = {value!r} is unknown; known: {', '.join(known)}"


def _always_on(config: RunConfig) -> Iterator[str]:
    if not config.actor_rollout_ref.model.use_remove_padding:
        yield (
            "actor_rollout_ref.model.use_remove_padding = false: sluice always packs tokens "
            "without padding; set it to true or leave it out"
        )
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield (
            f"{ROLLOUT}.calculate_log_probs = false: behaviour logprobs are always returned; "
            "set it to true or leave it out"
        )


def _clip(config: RunConfig) -> Iterator[str]:
    clip_ratio = config.actor_rollout_ref.actor.clip_ratio
    if clip_ratio != ActorConfig().clip_ratio:
        yield (
            f"{ACTOR}.clip_ratio = {clip_ratio} has no effect, since clip_ratio_low and "
            "clip_ratio_high always hold; set those two"
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
    if actor.clip_ratio_low >= 1:
        yield (
            f"{ACTOR}.clip_ratio_low = {actor.clip_ratio_low}: the lower bound of the ratio, "
            "1 - clip_ratio_low, must be positive; DAPO uses 0.2"
        )
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


def _asynchrony(config: RunConfig) -> Iterator[str]:
    staleness = config.sluice.asynchrony.max_staleness
    if staleness and not derived.is_corrected(config):
        yield (
            f"sluice.asynchrony.max_staleness = {staleness} with {ACTOR}.use_rollout_log_probs = "
            "false and algorithm.rollout_correction.rollout_is = null: nothing corrects for "
            "samples of an older policy; set rollout_is=token (or use_rollout_log_probs=true), or "
            "max_staleness=0"
        )
    correction = config.algorithm.rollout_correction
    if correction.rollout_is and config.actor_rollout_ref.actor.use_rollout_log_probs:
        yield (
            f"algorithm.rollout_correction.rollout_is = {correction.rollout_is} with "
            f"{ACTOR}.use_rollout_log_probs = true would have no effect, since old and behaviour "
            "logprobs are then the same; set one of the two"
        )


def _length_of_run(config: RunConfig) -> Iterator[str]:
    if config.data.train_files is None and config.trainer.total_training_steps is None:
        yield (
            "data.train_files and trainer.total_training_steps are both null, so the run has no "
            "length; set total_training_steps where only clients submit prompts"
        )
    if config.data.val_files is None and config.trainer.test_freq > 0:
        yield (
            f"trainer.test_freq = {config.trainer.test_freq} with data.val_files = null: there is "
            "nothing to validate on; give val_files or set test_freq=-1"
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


def _endpoints(config: RunConfig) -> Iterator[str]:
    services = config.sluice
    taken: dict[tuple[str, int], str] = {}
    for name, endpoint in (
        ("reward", services.reward.endpoint),
        ("trainer", services.trainer.endpoint),
        ("rollout", services.rollout.endpoint),
    ):
        where = (endpoint.host, endpoint.port)
        if endpoint.port and where in taken:
            yield (
                f"sluice.{name}.endpoint.port = {endpoint.port} taken by "
                f"sluice.{taken[where]}.endpoint; give each service its own port, or 0 to have "
                "one chosen"
            )
        taken.setdefault(where, name)
        if endpoint.host in {"0.0.0.0", "::"} and endpoint.advertise is None:  # noqa: S104
            yield (
                f"sluice.{name}.endpoint.host = {endpoint.host} is no address that peers can "
                f"reach; set sluice.{name}.endpoint.advertise to host:port"
            )
    replicas, port = services.rollout.replicas, services.rollout.endpoint.port
    if port and replicas > 1:
        yield (
            f"sluice.rollout.endpoint.port = {port} with sluice.rollout.replicas = {replicas}: "
            "all replicas would take one port; set the port to 0"
        )


def _limits(config: RunConfig) -> Iterator[str]:
    trainer, needed = config.sluice.trainer, derived.largest_batch_mb(config)
    if trainer.replica_ttl_s < 2 * trainer.heartbeat_interval_s:
        yield (
            f"sluice.trainer.replica_ttl_s = {trainer.replica_ttl_s:g} is less than two heartbeats "
            f"(heartbeat_interval_s = {trainer.heartbeat_interval_s:g}), so one late heartbeat "
            "drops a replica; raise it"
        )
    if needed > config.sluice.max_message_mb:
        yield (
            f"sluice.max_message_mb = {config.sluice.max_message_mb} is less than the {needed} MiB "
            f"a train batch of {derived.rows_per_batch(config)} rows can reach; raise it to "
            f"{needed}"
        )


_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _batch_sizes,
    _micro_batches,
    _group_size,
    _names,
    _always_on,
    _clip,
    _sampling,
    _optimizer,
    _overlong,
    _asynchrony,
    _length_of_run,
    _resume,
    _endpoints,
    _limits,
)
