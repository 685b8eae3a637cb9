"""The settings and files that an evaluation's stored responses come from, as recorded in its
folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import flat_settings
from sluice.config.run import RunConfig
from sluice.config.schema.data import file_list
from sluice.errors import ConfigError
from sluice.evaluation.stored_responses import FOLDER_NAME
from sluice.json_objects import DECODE_ERRORS
from sluice.launch.plan import with_absolute_paths
from sluice.service_contract import CONFIG_NAME
from sluice.whole_file import write_whole

ORIGIN_NAME = "evaluation.json"
"""In an evaluation's folder: the settings and files that its stored responses come from."""

_MODEL = "actor_rollout_ref.model.path"
_SCORER = "reward.custom_reward_function.path"
_OF_GRADING = "reward."
_DECISIVE = (
    "actor_rollout_ref.model.",
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("name", "dtype", "seed", "quantization", "max_model_len", "ignore_eos")
    ),
    "actor_rollout_ref.rollout.val_kwargs.",
    "actor_rollout_ref.rollout.multi_turn.",
    "actor_rollout_ref.rollout.agent.",
    "data.",
    _OF_GRADING,
    "sluice.environment.",
    "sluice.evaluation.",
)
_INDIFFERENT = (
    *(f"reward.scorer_pool.{name}" for name in ("num_workers", "timeout_s", "memory_mb")),
    "sluice.environment.workers",
    "sluice.environment.memory_limit_mb",
)
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


class EvaluationOrigin(msgspec.Struct, frozen=True):
    """The settings and files that determine responses and grades.

    Attributes:
        settings: values by dotted key.
        files: size in bytes and time in ns of each file.
    """

    settings: dict[str, Any]
    files: dict[str, list[int]]

    def without_model(self) -> EvaluationOrigin:
        """Return the part that other checkpoints share."""
        model = Path(str(self.settings.get(_MODEL)))
        return EvaluationOrigin(
            {key: value for key, value in self.settings.items() if key != _MODEL},
            {file: mark for file, mark in self.files.items() if Path(file).parent != model},
        )


def claim_folder(folder: Path, config: RunConfig) -> None:
    """Note what the responses in a folder come from; refuse a folder with those of another origin.

    Raises:
        ConfigError: names the first differences, or the folder holds something else.
    """
    noted, present = read_origin(folder), _origin_of(config)
    if noted is None and any((folder / name).exists() for name in (CONFIG_NAME, FOLDER_NAME)):
        raise ConfigError(
            f"--output {folder}: holds a run, or responses of unknown origin (no {ORIGIN_NAME}); "
            "give another --output"
        )
    if noted is not None and _has_responses(folder):
        _refuse_changes(folder, noted, present)
    else:
        write_origin(folder, present)


def refuse_other_origin(folder: Path, config: RunConfig) -> None:
    """Refuse a folder whose responses come from other settings, of whatever model.

    Raises:
        ConfigError: names the first differences.
    """
    if (noted := read_origin(folder)) is not None:
        _refuse_changes(folder, noted.without_model(), _origin_of(config).without_model())


def regraded_origin(folder: Path, overrides: list[str]) -> EvaluationOrigin | None:
    """Return the origin of an evaluation once its responses are graded with other settings.

    ``None`` if the folder notes none.

    Raises:
        ConfigError: a key is not one of grading.
    """
    if (noted := read_origin(folder)) is None:
        return None
    before, after = (
        _origin_of(load_config(folder / CONFIG_NAME, keys)) for keys in ([], overrides)
    )
    for key, _, value in _changes(before.settings, after.settings):
        if not key.startswith(_OF_GRADING):
            raise ConfigError(
                f"{key} = {value!r}: the responses were sampled with another value; leave it out, "
                "or evaluate into another --output"
            )
    sampling = {k: v for k, v in noted.settings.items() if not k.startswith(_OF_GRADING)}
    grading = {k: v for k, v in after.settings.items() if k.startswith(_OF_GRADING)}
    files = {k: v for k, v in noted.files.items() if k != noted.settings.get(_SCORER)}
    scorer = after.settings.get(_SCORER)
    return EvaluationOrigin(
        sampling | grading, files | {k: v for k, v in after.files.items() if k == scorer}
    )


def read_origin(folder: Path) -> EvaluationOrigin | None:
    """Return what a folder notes; ``None``: nothing.

    Raises:
        ConfigError: the note cannot be read.
    """
    note = folder / ORIGIN_NAME
    try:
        return msgspec.json.decode(note.read_bytes(), type=EvaluationOrigin)
    except FileNotFoundError:
        return None
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigError(f"{note} cannot be read ({error}); give another --output") from error


def write_origin(folder: Path, origin: EvaluationOrigin) -> None:
    """Write the note; a kill leaves the former one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(origin), indent=1) + b"\n"
    write_whole(folder / ORIGIN_NAME, content)


def _has_responses(folder: Path) -> bool:
    return any(file.stat().st_size for file in (folder / FOLDER_NAME).glob("*.jsonl"))


def _refuse_changes(folder: Path, noted: EvaluationOrigin, present: EvaluationOrigin) -> None:
    settings = _changes(noted.settings, present.settings)
    changes = [f"{key} = {before!r} is now {value!r}" for key, before, value in settings]
    for file, before, mark in _changes(noted.files, present.files):
        state = "is new" if before is None else "is gone" if mark is None else "was written again"
        changes.append(f"{file} {state}")
    if changes:
        remedy = ", or the settings of that one" if settings else ""
        raise ConfigError(
            f"--output {folder}: holds responses of another evaluation ({'; '.join(changes[:3])}); "
            f"give another --output{remedy}"
        )


def _changes(
    before: Mapping[str, object], after: Mapping[str, object]
) -> list[tuple[str, object, object]]:
    names = sorted(before.keys() | after.keys())
    return [
        (name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    ]


def _origin_of(config: RunConfig) -> EvaluationOrigin:
    config = with_absolute_paths(config)
    settings = {
        key: value
        for key, value in flat_settings(config).items()
        if key.startswith(_DECISIVE) and not key.startswith(_INDIFFERENT)
    }
    # As the note holds it: JSON has no tuples.
    return msgspec.json.decode(
        msgspec.json.encode(EvaluationOrigin(settings, _file_marks(config))), type=EvaluationOrigin
    )


def _file_marks(config: RunConfig) -> dict[str, list[int]]:
    """Return size and time of the files that decide the responses and their grades."""
    model = Path(config.actor_rollout_ref.model.path)
    files = [file for pattern in _MODEL_FILES for file in model.glob(pattern)]
    files += map(Path, file_list(config.data.val_files))
    turns = config.actor_rollout_ref.rollout.multi_turn
    functions = (
        config.reward.custom_reward_function.path,
        config.sluice.environment.path,
        turns.function_tool_path,
        turns.tool_config_path,
    )
    files += [Path(function) for function in functions if function is not None]
    marks = {}
    for file in filter(Path.is_file, files):
        status = file.stat()
        marks[str(file)] = [status.st_size, status.st_mtime_ns]
    return marks
