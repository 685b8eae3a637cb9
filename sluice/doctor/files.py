"""Check the files of a run: its model, its prompts, and the disk space for what it writes."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from sluice.config.derived import checkpoint_folder, uses_critic
from sluice.config.memory.shape import ModelShape
from sluice.config.rules.files import MODEL_KEY, model_problems
from sluice.config.run import RunConfig
from sluice.data.known_sources import DEFAULT_ROUTES, scorer_name
from sluice.data.prompt_files import PromptFiles, SlabReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns, PromptRow
from sluice.doctor.finding import (
    GIB,
    Examined,
    Finding,
    fine,
    gib,
    problem,
    problem_of_sentence,
    warning,
)
from sluice.errors import DataError

DEADLINE_S = 60.0  # hundreds of shards on a file server
# Of safetensors' header: the bytes of its length, and what the format's own reader accepts.
_LENGTH_BYTES, _LONGEST_HEADER = 8, 100 << 20
_POINTER = b"version https://git-lfs"
_INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "copy or download it again"
# Logs, metrics, ledger and dumps of samples.
RUN_BYTES = GIB
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATES = 3  # weights and AdamW's two moments, each as large as the weights
ROWS_LOOKED_AT = 256


class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of weights.

    Attributes:
        size_bytes: of the file.
        defect: why it is not whole; empty if it is.
        tensors: names of those in it.
    """

    size_bytes: int
    defect: str = ""
    tensors: frozenset[str] = field(default_factory=frozenset)


def read_shard(path: Path) -> Shard:
    """Read the header of a safetensors file, and compare it with the file's size.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
        if start == _POINTER:
            return Shard(size, "is a pointer of git-lfs, not the file itself")
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if len(start) < _LENGTH_BYTES or length > _LONGEST_HEADER:
            return Shard(size, "has no header of safetensors")
        if _LENGTH_BYTES + length > size:
            return Shard(size, f"ends within its header, after {size} bytes")
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    try:
        content = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        content.pop("__metadata__", None)
        places = {name: msgspec.json.decode(one, type=_Place) for name, one in content.items()}
    except msgspec.DecodeError as error:
        return Shard(size, f"has a header that cannot be read ({error})")
    end = max((place.data_offsets[1] for place in places.values()), default=0)
    expected = _LENGTH_BYTES + length + end
    defect = "" if size == expected else f"has {size} bytes, and its header describes {expected}"
    return Shard(size, defect, frozenset(places))


def check_model(examined: Examined) -> Iterator[Finding]:
    """Check the policy's folder, and the critic's where it starts from another model."""
    config = examined.config
    yield from model_findings(MODEL_KEY, config.actor_rollout_ref.model.path)
    critic = config.critic.model.path
    if uses_critic(config) and critic and critic != config.actor_rollout_ref.model.path:
        yield from model_findings("critic.model.path", critic)


def model_findings(key: str, path: str) -> Iterator[Finding]:
    """Yield what is missing, cut short or left over from another download."""
    why = "trainer and replicas refuse to start"
    sentences = [one.text for one in model_problems(path, key)]
    if sentences or not path:
        yield from (problem_of_sentence(one, why) for one in sentences)
        return
    folder = Path(path)
    shards = {file.name: read_shard(file) for file in sorted(folder.glob("*.safetensors"))}
    places: Mapping[str, str] = {}
    found: list[Finding] = []
    try:
        if (folder / _INDEX_FILE).is_file():
            index = (folder / _INDEX_FILE).read_bytes()
            places = msgspec.json.decode(index, type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        found.append(problem(f"{key}: {_INDEX_FILE} cannot be read ({error})", why, _AGAIN))
    if not shards and not found:
        what = f"{key} = {path!r} holds no *.safetensors"
        remedy = "take a checkpoint with safetensors, or save the model again with transformers"
        found.append(problem(what, "weights are read from these only: others can run code", remedy))
    found += _shard_findings(key, shards, places)
    yield from found
    if not found:
        size = sum(shard.size_bytes for shard in shards.values())
        tensors = sum(len(shard.tensors) for shard in shards.values())
        yield fine(f"{path}: {len(shards)} file(s) of weights, {tensors} tensors, {gib(size)}")


def _shard_findings(
    key: str, shards: Mapping[str, Shard], places: Mapping[str, str]
) -> Iterator[Finding]:
    why = "the trainer ends while it loads the weights"
    named = sorted(set(places.values()))
    missing = [name for name in named if name not in shards]
    if missing:
        what = (
            f"{key}: {len(missing)} of {len(named)} files that {_INDEX_FILE} names are not "
            f"there: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )
        yield problem(what, why, "download the missing files")
    for name, shard in shards.items():
        if shard.defect:
            remedy = "fetch it with git lfs pull" if "git-lfs" in shard.defect else _AGAIN
            yield problem(f"{key}: {name} {shard.defect}", why, remedy)
            continue
        absent = sorted({one for one, file in places.items() if file == name} - shard.tensors)
        if absent:
            yield problem(
                f"{key}: {name} lacks {len(absent)} tensor(s) that {_INDEX_FILE} places in "
                f"it, such as {absent[0]}",
                "index and files are of two versions of the model",
                "download the whole model again",
            )


def check_data(examined: Examined) -> Iterator[Finding]:
    """Check columns of every file, and the first rows."""
    data, config = examined.config.data, examined.config
    batch = data.train_batch_size
    yield from _data_findings(config, "data.train_files", data.train_files, batch)
    yield from _data_findings(config, "data.val_files", data.val_files, 0)


def _data_findings(
    config: RunConfig, key: str, named: str | list[str] | None, batch_rows: int
) -> Iterator[Finding]:
    files = (named,) if isinstance(named, str) else tuple(named or ())
    if not files:
        consequence = "only clients' prompts are trained on" if batch_rows else "no validation"
        yield fine(f"{key} is null: {consequence}")
        return
    columns = PromptColumns(config.data.prompt_key, config.data.reward_fn_key)
    try:
        opened = open_prompt_files(files, columns, config_key=key)
        sources = Counter(row.data_source for row in first_rows(opened))
    except DataError as error:
        yield problem_of_sentence(str(error), "the reward service refuses to start")
        return
    reward = config.reward
    has_own = reward.custom_reward_function.path is not None or reward.reward_model.enable
    routes = {**DEFAULT_ROUTES, **reward.scorer_routes}
    yield from row_findings(
        key,
        len(files),
        opened.num_rows,
        sources,
        has_own_scorer=has_own,
        routes=routes,
        batch_rows=batch_rows,
    )


def row_findings(
    key: str,
    num_files: int,
    num_rows: int,
    sources: Mapping[str, int],
    *,
    has_own_scorer: bool = False,
    routes: Mapping[str, str] = DEFAULT_ROUTES,
    batch_rows: int = 0,
) -> Iterator[Finding]:
    """Yield sources (with their number of first rows) that no scorer grades, and too few rows."""
    unknown = [name for name in sources if scorer_name(name, routes) is None]
    if unknown and not has_own_scorer:
        yield problem(
            f"{key}: no scorer is known for data source {unknown[0]!r} "
            f"({sources[unknown[0]]} of the first {sum(sources.values())} rows)",
            "its samples cannot be graded, so every group of it fails",
            "set reward.custom_reward_function.path, or name a built-in scorer in "
            f"reward.scorer_routes ({', '.join(sorted(set(routes.values())))})",
        )
    if 0 < num_rows < batch_rows:
        yield warning(
            f"{key}: {num_rows} rows are fewer than data.train_batch_size = {batch_rows}",
            "an epoch does not fill one batch, and filtering leaves less",
            "lower data.train_batch_size, or raise trainer.total_epochs",
        )
    yield fine(f"{key}: {num_rows} rows in {num_files} file(s); {', '.join(sources)}")


def first_rows(files: PromptFiles) -> Iterator[PromptRow]:
    """Yield rows with all checks of decoding: the first ones of the first file, one of each other.

    Raises:
        DataError: a row cannot be used.
    """
    reader, seen = SlabReader(), set[str]()
    for block in files.blocks:
        if block.path not in seen:
            count = 1 if seen else ROWS_LOOKED_AT
            seen.add(block.path)
            for slab in islice(reader.read(block), 1):
                for index in range(min(len(slab), count)):
                    yield slab.decode(index, files.columns)


def check_disk(examined: Examined) -> Iterator[Finding]:
    """Check the run's folder, and that of checkpoints."""
    config = examined.config
    yield _disk_finding("sluice.run_dir", config.sluice.run_dir, 0, 0)
    saves = config.trainer.save_freq > 0
    size = checkpoint_bytes(config, examined.shape) if saves else 0
    key = "trainer.default_local_dir" if config.trainer.default_local_dir else "sluice.run_dir"
    folder = checkpoint_folder(config)
    yield _disk_finding(key, folder, size, checkpoints_kept(config))


def _disk_finding(key: str, folder: str, size: int | None, kept: int | None) -> Finding:
    there = nearest_folder(Path(folder))
    free_bytes = shutil.disk_usage(there).free
    if os.access(there, os.W_OK | os.X_OK):
        return disk_finding(key, folder, free_bytes, size, kept)
    return problem(
        f"{key} = {folder} cannot be written by this user",
        "nothing of the run can be kept",
        f"give the right to it, or set {key} to another folder",
    )


def disk_finding(
    key: str, folder: str, free_bytes: int, one: int | None, kept: int | None
) -> Finding:
    """Judge whether the folder holds what comes.

    Args:
        key: the configuration key that names the folder.
        folder: as named; it need not exist yet.
        free_bytes: of its file system.
        one: bytes of a checkpoint; 0 where none is written, ``None`` if not known.
        kept: checkpoints at once; ``None``: all of them, and how many is not known.
    """
    where, free = f"{key} = {folder}", gib(free_bytes)
    move = f"free some, or set {key} to a folder on another disk"
    if one is None:
        return warning(
            f"{where}: {free} free; the size of a checkpoint is not known",
            "the model's config.json is not here",
            "compare it with 12 bytes a parameter (float32 weights and AdamW's moments)",
        )
    if one == 0 and free_bytes < RUN_BYTES:
        why = "logs, metrics and the ledger of a long run take about 1 GiB"
        return warning(f"{where}: {free} free", why, move)
    if one == 0:
        return fine(f"{where}: {free} free")
    if free_bytes < one:
        what = f"{where}: {free} free, and a checkpoint takes {gib(one)}"
        return problem(what, "the first save fails, and the run with it", move)
    if free_bytes < one * (kept or 2):
        number = "all checkpoints are kept" if kept is None else f"{kept} at once"
        return warning(
            f"{where}: {free} free, and a checkpoint takes {gib(one)} ({number})",
            "a later save fails, and the run with it",
            f"{move}; or set trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq",
        )
    return fine(f"{where}: {free} free, a checkpoint takes {gib(one)}")


def checkpoint_bytes(config: RunConfig, shape: ModelShape | None) -> int | None:
    """Return the size of one checkpoint: twice a model's with a critic; ``None`` if not known."""
    if config.trainer.save_freq <= 0:
        return 0
    if shape is None:
        return None
    width = _BYTES[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    return shape.total_parameters * width * _STATES * (2 if uses_critic(config) else 1)


def checkpoints_kept(config: RunConfig) -> int | None:
    """Return the most at one time; ``None``: all of them, and how many is not known."""
    keep, steps = config.trainer.max_actor_ckpt_to_keep, config.trainer.total_training_steps
    saves = None
    if steps is not None and config.trainer.save_freq > 0:
        saves = -(-steps // config.trainer.save_freq)
    if keep is None:
        return saves
    # One more than are kept: the oldest goes when the newest is whole.
    return keep + 1 if saves is None else min(keep + 1, saves)


def nearest_folder(path: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if one.is_dir())
