"""Convert verl's keys and values to sluice's. Keys that the user set keep their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from msgspec import UNSET

from sluice.algorithm.sampling.rules import StrategyName
from sluice.config.catalogue.table import catalogue
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.parallel_layout import (
    EXPERT_KEY,
    PIPELINE_KEY,
    SEQUENCE_KEY,
    SHARD_KEY,
    TENSOR_KEY,
)
from sluice.config.problems import Problem
from sluice.config.run import value_at
from sluice.config.schema.service import FILE_FIELDS

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_V1, _ENGINE = "trainer.v1", f"{_ROLLOUT}.checkpoint_engine"
_FILTER, _CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"
_STALENESS = "sluice.asynchrony.max_staleness"
_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
}
_LOGGERS = {"file": "jsonl", "vemlp_wandb": "wandb"}
_MANAGERS = {"prime": "naive", "rate_limited": "naive", "limited": "naive", "remote": "naive"}

NULL_IS_DEFAULT = (
    "actor_rollout_ref.actor.data_loader_seed",
    "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.min_lr_ratio",
    "actor_rollout_ref.actor.profiler.ranks",
    "critic.data_loader_seed",
    "critic.optim.lr_warmup_steps",
    "critic.optim.min_lr_ratio",
    "algorithm.filter_groups.metric",
    "reward.custom_reward_function.name",
)
"""Keys whose null means the default in verl."""

_SHARDING = f"{_ACTOR}.fsdp_config"
_SIZES = (SHARD_KEY, SEQUENCE_KEY, EXPERT_KEY, TENSOR_KEY, PIPELINE_KEY)
"""Sizes of the trainer's layout, which have other names in other backends of verl."""

_OPTIMIZER_OFFLOADS = (
    "megatron.optimizer_offload",
    "optim.override_optimizer_config.optimizer_cpu_offload",
)
"""Megatron's keys that move the optimizer's state to the host, each enough."""


def _word_translator(words: Mapping[str, str]) -> Callable[[object], object]:
    """Return a translation of a word, or of each word of a list."""

    def translate(value: object) -> object:
        if isinstance(value, list):
            return [translate(item) for item in value]
        return words.get(value, value) if isinstance(value, str) else value

    return translate


def _none_to_null(value: object) -> object:
    """Return null for the text None, which stands in verl's files up to 0.5."""
    return None if value == "None" else value


def _logger_names(value: object) -> object:
    return _word_translator(_LOGGERS)([value] if isinstance(value, str) else value)


def _non_positive_to_null(value: object) -> object:
    return None if type(value) is int and value <= 0 else value


def _expand_home_of_sources(sources: object) -> object:
    """Expand the files of each source."""
    if not isinstance(sources, dict):
        return sources
    return {
        name: {**source, "files": _expand_home(source["files"])}
        if isinstance(source, dict) and "files" in source
        else source
        for name, source in sources.items()
    }


def _expand_home(value: object) -> object:
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    is_home = isinstance(value, str) and value.startswith("~/")
    return str(Path(str(value)).expanduser()) if is_home else value


def _number_to_text(value: object) -> object:
    """Return a number, such as a date, as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _expand_home_or_null(value: object) -> object:
    return _expand_home(value or None)


PATH_KEYS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "critic.model.path",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "sluice.environment.path",
    "sluice.run_dir",
    *(f"sluice.security.{name}" for name in FILE_FIELDS),
)
"""Keys that name files and folders, without the files of `sluice.sources`."""

_EMPTY_IS_NULL = (
    "reward.custom_reward_function.path",
    "trainer.resume_from_path",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)
"""Files and folders whose empty text means none, as in verl."""

WORDS: dict[str, Callable[[object], object]] = {
    **dict.fromkeys(PATH_KEYS, _expand_home),
    f"{_ACTOR}.fsdp_config.model_dtype": _word_translator(_DTYPES),
    f"{_ACTOR}.fsdp_config.dtype": _word_translator(_DTYPES),
    "critic.fsdp.model_dtype": _word_translator(_DTYPES),
    "critic.fsdp.dtype": _word_translator(_DTYPES),
    "actor_rollout_ref.ref.megatron.expert_tensor_parallel_size": _none_to_null,
    f"{_ROLLOUT}.dtype": _word_translator(_DTYPES),
    f"{_ROLLOUT}.quantization": lambda value: None if value is False else value,
    "reward.reward_manager.name": _word_translator(_MANAGERS),
    "trainer.experiment_name": _number_to_text,
    "trainer.logger": _logger_names,
    "trainer.project_name": _number_to_text,
    "sluice.sources": _expand_home_of_sources,
    "actor_rollout_ref.model.lora.adapter_path": _expand_home,
    **dict.fromkeys(_EMPTY_IS_NULL, _expand_home_or_null),
    "trainer.max_actor_ckpt_to_keep": _non_positive_to_null,
    "trainer.max_critic_ckpt_to_keep": _non_positive_to_null,
}
"""Keys whose values have other words in verl, with the function that translates them."""


def translate_words(tree: SettingsTree) -> None:
    """Replace values in place; the check of types finds unknown ones."""
    for key, translate in WORDS.items():
        value = tree.get(key)
        if value is not UNSET:
            path = tuple(key.split("."))
            tree.set(path, translate(value), tree.spelled.get(path, path))
    for key in NULL_IS_DEFAULT:
        if tree.get(key) is None:
            tree.remove(tuple(key.split(".")))
    _fill_symmetric_clip(tree)
    rank, alpha = (tree.get(f"actor_rollout_ref.model.lora_{name}") for name in ("rank", "alpha"))
    if rank == 0 or (rank is UNSET and alpha == 0):
        tree.remove(("actor_rollout_ref", "model", "lora_alpha"))


def _fill_symmetric_clip(tree: SettingsTree) -> None:
    """Give a bound that is null the value of clip_ratio, as in verl."""
    for bound in ("clip_ratio_low", "clip_ratio_high"):
        path = ("actor_rollout_ref", "actor", bound)
        if tree.get(".".join(path)) is None:
            tree.remove(path)
            symmetric = tree.get(f"{_ACTOR}.clip_ratio")
            if symmetric is not UNSET:
                tree.set(path, symmetric, path)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The keys that were set, above the schema's defaults; every value has its key's type."""

    tree: SettingsTree
    defaults: Mapping[str, object]
    problems: list[Problem] = field(default_factory=list)

    def user_value(self, key: str) -> object:
        """Return the value that was set; `None` if it is null or not set."""
        value = self.tree.get(key)
        return None if value is UNSET else value

    def number(self, key: str) -> float:
        """Return the effective number: as set, else the default."""
        value = self.user_value(key)
        if value is None:
            value = value_at(self.defaults, key.split("."), UNSET)
        assert isinstance(value, int | float)
        return value

    def put(self, key: str, value: object, *, over: bool = False) -> None:
        """Set `key` unless it was set; with `over` in any case."""
        path = tuple(key.split("."))
        if over or self.tree.get(key) is UNSET:
            self.tree.set(path, value, path)


def convert_settings(tree: SettingsTree, defaults: Mapping[str, object]) -> list[Problem]:
    """Apply every conversion in place. Types must have been checked before.

    Returns:
        keys that ask for different values of one setting.
    """
    settings = _Settings(tree, defaults)
    for convert in _CONVERSIONS:
        convert(settings)
    return settings.problems


def _convert_lengths(settings: _Settings) -> None:
    """Let the engine's limits override the data's, as in verl."""
    for name in ("prompt", "response"):
        limit = settings.user_value(f"{_ROLLOUT}.{name}_length")
        if limit is not None:
            settings.put(f"data.max_{name}_length", limit, over=True)


def _convert_memory(settings: _Settings) -> None:
    """Let the memory share of a replica with separate devices win, as in verl."""
    share = settings.user_value(f"{_ROLLOUT}.standalone_gpu_memory_utilization")
    if share is not None:
        settings.put(f"{_ROLLOUT}.gpu_memory_utilization", share, over=True)


def _convert_generation_rounds(settings: _Settings) -> None:
    """Express the limit of rounds as a minimum yield.

    verl gives up when k rounds of g prompts keep fewer than P groups: the minimum yield is
    P / (k g) over k g groups. The strategy `rounds` counts its rounds and needs no yield.
    """
    rounds = settings.user_value(f"{_FILTER}.max_num_gen_batches")
    if not isinstance(rounds, int):
        return
    if rounds <= 0 or settings.user_value("sluice.sampling.strategy") == StrategyName.ROUNDS:
        settings.put(f"{_FILTER}.min_yield", 0.0)
        return
    batch = settings.number("data.train_batch_size")
    per_round = settings.user_value("data.gen_batch_size") or batch
    assert isinstance(per_round, int | float)
    groups = int(rounds * per_round)
    settings.put(f"{_FILTER}.min_yield", min(1.0, batch / groups))
    settings.put(f"{_FILTER}.min_yield_groups", groups)


def _convert_micro_batches(settings: _Settings) -> None:
    """Turn rows over all ranks, verl's old keys, into rows per rank."""
    ranks = int(settings.number("trainer.nnodes") * settings.number("trainer.n_gpus_per_node"))
    for key in (
        f"{_ACTOR}.ppo_micro_batch_size",
        "critic.ppo_micro_batch_size",
    ):
        rows = settings.user_value(key)
        if isinstance(rows, int):
            settings.put(f"{key}_per_gpu", max(1, rows // ranks))


def _convert_steps(settings: _Settings) -> None:
    """Turn the prompts of a run, of verl's fully asynchronous recipe, into train batches."""
    prompts = settings.user_value("rollout.total_rollout_steps")
    if isinstance(prompts, int):
        batch = int(settings.number("data.train_batch_size"))
        settings.put("trainer.total_training_steps", max(1, prompts // batch))


def _convert_replicas(settings: _Settings) -> None:
    """Turn devices for rollouts into replicas: devices over devices per replica."""
    machines = settings.user_value(f"{_ROLLOUT}.nnodes")
    if not isinstance(machines, int) or machines == 0:
        return
    per_machine = settings.user_value(f"{_ROLLOUT}.n_gpus_per_node")
    devices = machines * (per_machine if isinstance(per_machine, int) else 8)
    sizes = [f"{_ROLLOUT}.{name}_parallel_size" for name in ("tensor_model", "data")]
    per_replica = int(settings.number(sizes[0]) * settings.number(sizes[1]))
    settings.put("sluice.rollout.replicas", max(1, devices // per_replica))


@cache
def _copied_keys() -> dict[str, list[str]]:
    """Return the keys whose values another key takes over as they are, by that key."""
    by_target: dict[str, list[str]] = {}
    for entry in catalogue().values():
        if entry.is_copied:
            by_target.setdefault(entry.targets[0], []).append(entry.path)
    return by_target


def _copy_values(settings: _Settings) -> None:
    """Copy values; two different values for one size of the trainer's layout are a problem."""
    for target, names in _copied_keys().items():
        user_values = {name: settings.user_value(name) for name in (target, *names)}
        present = {name: value for name, value in user_values.items() if value is not None}
        if target in _SIZES and len(set(present.values())) > 1:
            (first_name, value), *_ = present.items()
            other_name = next(name for name in present if present[name] != value)
            message = (
                f"and {other_name} = {present[other_name]} are one size of the trainer's layout"
            )
            remedy = "keep one of the two"
            settings.problems.append(Problem(first_name, value, message, remedy))
        elif present:
            settings.put(target, next(iter(present.values())))


def names_set(key: str, settings: SettingsTree) -> tuple[str, ...]:
    """Return the names under which a launch sets a size of the layout, else `key` itself.

    All of them must change with the size, since two that differ are a problem.
    """
    names = (key, *_copied_keys().get(key, ()))
    return tuple(name for name in names if settings.get(name) not in (UNSET, None)) or (key,)


def _convert_optimizer_offload(settings: _Settings) -> None:
    for model, sharding in ((_ACTOR, _SHARDING), ("critic", "critic.fsdp")):
        values = [settings.user_value(f"{model}.{key}") for key in _OPTIMIZER_OFFLOADS]
        present = [value for value in values if value is not None]
        if present:
            settings.put(f"{sharding}.optimizer_offload", any(present))


def _convert_transport(settings: _Settings) -> None:
    backend = settings.user_value(f"{_ENGINE}.backend")
    if backend in ("nccl", "hccl"):
        settings.put("sluice.weights.backend", backend)


def _convert_asynchrony(settings: _Settings) -> None:
    mode = settings.user_value(f"{_V1}.trainer_mode")
    ahead = settings.user_value(f"{_V1}.colocate_async.num_warmup_batches")
    oldest = settings.user_value(f"{_V1}.sampler.max_off_policy_threshold")
    if mode == "sync":
        settings.put(_STALENESS, 0)
    elif mode == "colocate_async":
        settings.put(_STALENESS, ahead if isinstance(ahead, int) else 1)
    elif mode == "separate_async":
        settings.put(_STALENESS, max(0, (oldest if isinstance(oldest, int) else 8) - 1))
        settings.put(
            "sluice.asynchrony.on_stale",
            settings.user_value(f"{_V1}.sampler.max_off_policy_strategy") or "drop",
        )


def _convert_min_lr(settings: _Settings) -> None:
    """Turn a least learning rate into a share of the peak."""
    for prefix in (f"{_ACTOR}.optim", "critic.optim"):
        min_lr = settings.user_value(f"{prefix}.min_lr")
        if isinstance(min_lr, int | float):
            peak = settings.number(f"{prefix}.lr")
            settings.put(f"{prefix}.min_lr_ratio", min(1.0, min_lr / peak))


def _convert_retention(settings: _Settings) -> None:
    if settings.user_value("trainer.remove_previous_ckpt_in_save") is True:
        settings.put("trainer.max_actor_ckpt_to_keep", 1)


_MODEL = "actor_rollout_ref.model"
_MEGATRON_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_q": ["q_proj"],
    "linear_k": ["k_proj"],
    "linear_v": ["v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"],
    "linear_fc2": ["down_proj"],
}
_MEGATRON_ALPHA = 32.0


def _convert_megatron_adapters(settings: _Settings) -> None:
    """Take Megatron's adapters by the names of this model's layers, with Megatron's defaults."""
    block = f"{_MODEL}.lora"
    rank, path = settings.user_value(f"{block}.rank"), settings.user_value(f"{block}.adapter_path")
    if not rank and path is None:
        return

    def layers(key: str) -> list[str]:
        setting = settings.user_value(f"{block}.{key}")
        modules = [setting] if isinstance(setting, str) else setting
        assert isinstance(modules, list | None)
        return [
            layer for module in modules or () for layer in _MEGATRON_LAYERS.get(module, [module])
        ]

    settings.put(f"{_MODEL}.lora_rank", rank or 0)
    settings.put(f"{_MODEL}.lora_adapter_path", path)
    settings.put(f"{_MODEL}.lora_alpha", settings.user_value(f"{block}.alpha") or _MEGATRON_ALPHA)
    default_modules = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    usual = [layer for module in default_modules for layer in _MEGATRON_LAYERS[module]]
    settings.put(f"{_MODEL}.target_modules", layers("target_modules") or usual)
    settings.put(f"{_MODEL}.exclude_modules", layers("exclude_modules") or None)


def _convert_group_scale(settings: _Settings) -> None:
    scale = settings.user_value("algorithm.scale_rewards")
    if scale is not None:
        settings.put("algorithm.norm_adv_by_std_in_grpo", bool(scale))


def _pair_adpo(settings: _Settings) -> None:
    """Set both the estimator and the loss to ADPO if one of them is."""
    pair = ("algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode")
    if "adpo" in map(settings.user_value, pair):
        for key in pair:
            settings.put(key, "adpo")


def _set_correction(settings: _Settings) -> None:
    """Correct for samples of older policies in the way that fits the loss.

    A null that the user wrote is kept and refused later, so that no run loses the correction
    unnoticed.
    """
    weights, behavior = f"{_CORRECTION}.rollout_is", f"{_ACTOR}.use_rollout_log_probs"
    loss = settings.user_value(f"{_ACTOR}.policy_loss.loss_mode")
    is_bypassed = settings.user_value(f"{_CORRECTION}.bypass_mode") is True or loss == "bypass_mode"
    if not settings.number(_STALENESS) or settings.user_value(behavior) is True:
        return
    if is_bypassed and settings.user_value(f"{_CORRECTION}.loss_type") != "reinforce":
        return  # its ratio is to the behavior policy
    if loss == "adpo":
        correction_keys = ("rollout_is", "rollout_is_batch_normalize", "rollout_rs")
        if not any(settings.user_value(f"{_CORRECTION}.{name}") for name in correction_keys):
            settings.put(behavior, True)
    else:
        settings.put(weights, "token")


_CONVERSIONS: tuple[Callable[[_Settings], None], ...] = (
    _convert_lengths,
    _convert_memory,
    _convert_generation_rounds,
    _convert_micro_batches,
    _convert_steps,
    _convert_replicas,
    _copy_values,
    _convert_optimizer_offload,
    _convert_transport,
    _convert_asynchrony,
    _convert_min_lr,
    _convert_retention,
    _convert_megatron_adapters,
    _convert_group_scale,
    _pair_adpo,
    _set_correction,
)
