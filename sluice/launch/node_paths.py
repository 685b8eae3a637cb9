"""Files and folders that a service opens by the same path on whatever node it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sluice.config.run import RunConfig
from sluice.config.security import FILE_FIELDS, with_absolute_files
from sluice.launch.network_layout import Kind

_PACKAGE, _FILE = "pkg://", "file://"


def paths_of(kind: Kind, config: RunConfig) -> dict[str, str]:
    """What has to be there before a service starts, by the key that names it."""
    return {
        **dict(_own_paths(kind, config)),
        **{
            f"sluice.security.{name}": path
            for name in FILE_FIELDS
            if (path := getattr(config.sluice.security, name))
        },
    }


def missing_paths(paths: Mapping[str, str]) -> list[str]:
    """Those that are not on this node, as ``key = path``."""
    return [f"{key} = {path}" for key, path in paths.items() if not Path(path).exists()]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same with every path of a file or folder absolute, as seen from here.

    Processes on other nodes have another working directory.
    """
    model, trainer = config.actor_rollout_ref.model, config.trainer
    function, critic = config.reward.custom_reward_function, config.critic
    replace = msgspec.structs.replace
    return replace(
        config,
        actor_rollout_ref=replace(
            config.actor_rollout_ref, model=replace(model, path=_absolute(model.path))
        ),
        critic=replace(
            critic, model=replace(critic.model, path=_absolute_if_given(critic.model.path))
        ),
        data=replace(
            config.data,
            train_files=_all_absolute(config.data.train_files),
            val_files=_all_absolute(config.data.val_files),
        ),
        reward=replace(
            config.reward,
            custom_reward_function=replace(function, path=_absolute_if_given(function.path)),
        ),
        trainer=replace(
            trainer,
            default_local_dir=_absolute_if_given(trainer.default_local_dir),
            resume_from_path=_absolute_if_given(trainer.resume_from_path),
            rollout_data_dir=_absolute_if_given(trainer.rollout_data_dir),
            validation_data_dir=_absolute_if_given(trainer.validation_data_dir),
        ),
        sluice=replace(
            config.sluice,
            run_dir=_absolute(config.sluice.run_dir),
            security=with_absolute_files(config.sluice.security),
        ),
    )


def _own_paths(kind: Kind, config: RunConfig) -> Iterator[tuple[str, str]]:
    if kind != "reward":
        yield "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    if kind == "trainer":
        if config.trainer.resume_mode == "resume_path" and config.trainer.resume_from_path:
            yield "trainer.resume_from_path", config.trainer.resume_from_path
        if config.critic.model.path:
            yield "critic.model.path", config.critic.model.path
    if kind == "reward":
        for key in ("train_files", "val_files"):
            for number, file in enumerate(_listed(getattr(config.data, key))):
                yield f"data.{key}[{number}]", file
        path = config.reward.custom_reward_function.path
        if path and not path.startswith(_PACKAGE):
            yield "reward.custom_reward_function.path", path.removeprefix(_FILE)


def _listed(files: str | list[str] | None) -> list[str]:
    return [files] if isinstance(files, str) else files or []


def _all_absolute(files: str | list[str] | None) -> str | list[str] | None:
    if isinstance(files, list):
        return [_absolute(file) for file in files]
    return _absolute_if_given(files)


def _absolute_if_given(path: str | None) -> str | None:
    return path and _absolute(path)


def _absolute(path: str) -> str:
    if path.startswith(_PACKAGE):
        return path
    return str(Path(path.removeprefix(_FILE)).absolute())
