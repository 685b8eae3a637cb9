"""Turns verl's words for values into sluice's, before types are checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sluice.config.catalogue.entry import ABSENT
from sluice.config.settings_tree import SettingsTree

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
}
_LOGGERS = {"file": "jsonl", "vemlp_wandb": "wandb"}
_MANAGERS = {"prime": "naive", "rate_limited": "naive", "limited": "naive", "remote": "naive"}


def _dtype(value: object) -> object:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _loggers(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    return [_LOGGERS.get(name, name) if isinstance(name, str) else name for name in value]


def _manager(value: object) -> object:
    return _MANAGERS.get(value, value) if isinstance(value, str) else value


def _keep_all(value: object) -> object:
    return None if type(value) is int and value <= 0 else value


def _home(value: object) -> object:
    if isinstance(value, list):
        return [_home(item) for item in value]
    is_home = isinstance(value, str) and value.startswith("~/")
    return str(Path(str(value)).expanduser()) if is_home else value


def _quantization(value: object) -> object:
    return None if value is False else value


WORDS: dict[str, Callable[[object], object]] = {
    f"{_ACTOR}.fsdp_config.model_dtype": _dtype,
    f"{_ACTOR}.fsdp_config.dtype": _dtype,
    "critic.fsdp.model_dtype": _dtype,
    "critic.fsdp.dtype": _dtype,
    f"{_ROLLOUT}.dtype": _dtype,
    f"{_ROLLOUT}.quantization": _quantization,
    "reward.reward_manager.name": _manager,
    "trainer.logger": _loggers,
    "trainer.default_local_dir": _home,
    "trainer.resume_from_path": _home,
    "data.train_files": _home,
    "data.val_files": _home,
    "actor_rollout_ref.model.path": _home,
    "critic.model.path": _home,
    "reward.custom_reward_function.path": _home,
    "trainer.max_actor_ckpt_to_keep": _keep_all,
    "trainer.max_critic_ckpt_to_keep": _keep_all,
}
"""Keys whose values have other words in verl, with what turns them into ours."""

NULL_IS_DEFAULT = ("algorithm.filter_groups.metric", "reward.custom_reward_function.name")
"""Keys whose null in verl asks for the default."""


def translate_words(tree: SettingsTree) -> None:
    """Replaces values in place; what is not known is left to the check of types."""
    for key, translate in WORDS.items():
        value = tree.get(key)
        if value is not ABSENT:
            path = tuple(key.split("."))
            tree.set(path, translate(value), tree.spelled.get(path, path))
    for key in NULL_IS_DEFAULT:
        if tree.get(key) is None:
            tree.remove(tuple(key.split(".")))
    _symmetric_clip(tree)


def _symmetric_clip(tree: SettingsTree) -> None:
    """A bound set to null takes the value of clip_ratio, as in verl."""
    for bound in ("clip_ratio_low", "clip_ratio_high"):
        path = ("actor_rollout_ref", "actor", bound)
        if tree.get(".".join(path)) is None:
            tree.remove(path)
            symmetric = tree.get(f"{_ACTOR}.clip_ratio")
            if symmetric is not ABSENT:
                tree.set(path, symmetric, path)
