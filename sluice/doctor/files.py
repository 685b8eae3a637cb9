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

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 << 20  # what the format's own reader accepts
_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"


class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file.

    Attributes:
        size_bytes: of the file.
        defect: why it is not whole; empty if it is.
        tensors: names of those in it.
    """

    size_bytes: int
    defect: str = ""
    tensors: frozenset[str] = field(default_factory=frozenset)


def read_shard(path: Path) -> Shard:
    """Reads the header.

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
        return _judged(size, length, file.read(length))


def _judged(size: int, length: int, header: bytes) -> Shard:
    try:
        content = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        places: Mapping[str, _Place] = {
            name: msgspec.json.decode(place, type=_Place)
            for name, place in content.items()
            if name != _METADATA
        }
    except msgspec.DecodeError as error:
        return Shard(size, f"has a header that cannot be read ({error})")
    end = max((place.data_offsets[1] for place in places.values()), default=0)
    expected = _LENGTH_BYTES + length + end
    defect = "" if size == expected else f"has {size} bytes, and its header tells of {expected}"
    return Shard(size, defect, frozenset(places))


# Logs, metrics, ledger and dumps of samples.
RUN_BYTES = GIB
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOMENTS = 2  # AdamW's, each as large as the weights


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """One folder of the run.

    Attributes:
        key: the configuration key that names it.
        folder: as named; it need not be there yet.
        is_writable: it, or the nearest folder above it that is there.
        free_bytes: of its file system, for this user.
        checkpoint_bytes: of one checkpoint; 0 where none is written, ``None`` if not known.
        num_kept: checkpoints at once; ``None``: all of them, and how many is not known.
    """

    key: str
    folder: str
    is_writable: bool
    free_bytes: int
    checkpoint_bytes: int | None
    num_kept: int | None


def check_disk(examined: Examined) -> Iterator[Finding]:
    """The run's folder, and that of checkpoints."""
    config = examined.config
    yield from disk_findings(_disk_facts("sluice.run_dir", config.sluice.run_dir, 0, 0))
    saves = config.trainer.save_freq > 0
    size = checkpoint_bytes(config, examined.shape) if saves else 0
    kept = checkpoints_kept(config)
    key = "trainer.default_local_dir" if config.trainer.default_local_dir else "sluice.run_dir"
    yield from disk_findings(_disk_facts(key, checkpoint_folder(config), size, kept))


def disk_findings(facts: DiskFacts) -> Iterator[Finding]:
    """Whether it can be written, and holds what comes."""
    where, free = f"{facts.key} = {facts.folder}", gib(facts.free_bytes)
    one, kept = facts.checkpoint_bytes, facts.num_kept
    move = f"free some, or set {facts.key} to a folder on another disk"
    if not facts.is_writable:
        yield problem(
            f"{where} cannot be written by this user",
            "nothing of the run can be kept",
            f"give the right to it, or set {facts.key} to another folder",
        )
    elif one is None:
        yield warning(
            f"{where}: {free} free; how large a checkpoint is cannot be said",
            "the model's config.json is not here",
            "compare it with 12 bytes a parameter (float32 weights and AdamW's moments)",
        )
    elif one == 0:
        yield _logs(where, facts.free_bytes, move)
    elif facts.free_bytes < one:
        yield problem(
            f"{where}: {free} free, and a checkpoint takes {gib(one)}",
            "the first save fails, and the run with it",
            move,
        )
    elif facts.free_bytes < one * (kept or 2):
        number = "all checkpoints are kept" if kept is None else f"{kept} at once"
        yield warning(
            f"{where}: {free} free, and a checkpoint takes {gib(one)} ({number})",
            "a later save fails, and the run with it",
            f"{move}; or set trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq",
        )
    else:
        yield fine(f"{where}: {free} free, a checkpoint takes {gib(one)}")


def checkpoint_bytes(config: RunConfig, shape: ModelShape | None) -> int | None:
    """Of one: weights and AdamW's moments in the dtype that is trained, twice with a critic."""
    if config.trainer.save_freq <= 0:
        return 0
    if shape is None:
        return None
    width = _BYTES[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    models = 2 if uses_critic(config) else 1
    return shape.total_parameters * width * (1 + _MOMENTS) * models


def checkpoints_kept(config: RunConfig) -> int | None:
    """Most at one time: one more than are kept, since the oldest goes when the newest is whole."""
    keep, steps = config.trainer.max_actor_ckpt_to_keep, config.trainer.total_training_steps
    saves = None
    if steps is not None and config.trainer.save_freq > 0:
        saves = -(-steps // config.trainer.save_freq)
    if keep is None:
        return saves
    return keep + 1 if saves is None else min(keep + 1, saves)


def _logs(where: str, free_bytes: int, move: str) -> Finding:
    if free_bytes < RUN_BYTES:
        what = f"{where}: {gib(free_bytes)} free"
        return warning(what, "logs, metrics and the ledger of a long run take about 1 GiB", move)
    return fine(f"{where}: {gib(free_bytes)} free")


def _disk_facts(key: str, folder: str, size: int | None, kept: int | None) -> DiskFacts:
    there = nearest_folder(Path(folder))
    free = shutil.disk_usage(there).free
    return DiskFacts(key, folder, os.access(there, os.W_OK | os.X_OK), free, size, kept)


def nearest_folder(path: Path) -> Path:
    """It, or the nearest one above it that is there."""
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if one.is_dir())


ROWS_LOOKED_AT = 256
DATA_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class DataFacts:
    """The files of one key.

    Attributes:
        key: that names them.
        files: as named.
        num_rows: in all of them.
        defect: why they cannot be read, with the remedy; empty if they can.
        sources: data sources of the first rows, and how many have each.
        has_own_scorer: a reward function or model grades whatever the source.
        routes: of the configuration and built in.
        batch_rows: rows of one train batch; 0 for files that make none.
    """

    key: str
    files: tuple[str, ...]
    num_rows: int = 0
    defect: str = ""
    sources: Mapping[str, int] = field(default_factory=dict)
    has_own_scorer: bool = False
    routes: Mapping[str, str] = field(default_factory=lambda: DEFAULT_ROUTES)
    batch_rows: int = 0


def check_data(examined: Examined) -> Iterator[Finding]:
    """Columns of every file, and the first rows."""
    data, config = examined.config.data, examined.config
    batch = data.train_batch_size
    yield from data_findings(_data_facts(config, "data.train_files", data.train_files, batch))
    yield from data_findings(_data_facts(config, "data.val_files", data.val_files, 0))


def data_findings(facts: DataFacts) -> Iterator[Finding]:
    """What cannot be read, is too little, or would be graded by nothing."""
    if not facts.files:
        consequence = (
            "only clients' prompts are trained on" if facts.batch_rows else "no validation"
        )
        yield fine(f"{facts.key} is null: {consequence}")
        return
    if facts.defect:
        yield problem_of_sentence(facts.defect, "the reward service refuses to start")
        return
    unknown = [name for name in facts.sources if scorer_name(name, facts.routes) is None]
    if unknown and not facts.has_own_scorer:
        yield problem(
            f"{facts.key}: no scorer is known for data source {unknown[0]!r} "
            f"({facts.sources[unknown[0]]} of the first {sum(facts.sources.values())} rows)",
            "its samples cannot be graded, so every group of it fails",
            "set reward.custom_reward_function.path, or name a built-in scorer in "
            f"reward.scorer_routes ({', '.join(sorted(set(facts.routes.values())))})",
        )
    if 0 < facts.num_rows < facts.batch_rows:
        yield warning(
            f"{facts.key}: {facts.num_rows} rows are fewer than data.train_batch_size = "
            f"{facts.batch_rows}",
            "an epoch does not fill one batch, and filtering leaves less",
            "lower data.train_batch_size, or raise trainer.total_epochs",
        )
    sources = ", ".join(facts.sources)
    yield fine(f"{facts.key}: {facts.num_rows} rows in {len(facts.files)} file(s); {sources}")


def _data_facts(
    config: RunConfig, key: str, named: str | list[str] | None, batch_rows: int
) -> DataFacts:
    files = (named,) if isinstance(named, str) else tuple(named or ())
    if not files:
        return DataFacts(key, files, batch_rows=batch_rows)
    columns = PromptColumns(config.data.prompt_key, config.data.reward_fn_key)
    try:
        opened = open_prompt_files(files, columns, config_key=key)
        sources = Counter(row.data_source for row in first_rows(opened))
    except DataError as error:
        return DataFacts(key, files, defect=str(error), batch_rows=batch_rows)
    reward = config.reward
    return DataFacts(
        key,
        files,
        opened.num_rows,
        sources=sources,
        has_own_scorer=reward.custom_reward_function.path is not None or reward.reward_model.enable,
        routes={**DEFAULT_ROUTES, **reward.scorer_routes},
        batch_rows=batch_rows,
    )


def first_rows(files: PromptFiles) -> Iterator[PromptRow]:
    """Decoded, with all that decoding checks; one of each file first, then those of the first.

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


INDEX_FILE = "model.safetensors.index.json"
CRITIC_KEY = "critic.model.path"
MODEL_DEADLINE_S = 60.0  # hundreds of shards on a file server
_AGAIN = "copy or download it again"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's folder.

    Attributes:
        key: that names it.
        sentences: what is wrong with the folder itself, each with its remedy.
        weight_map: tensor to file, as the index has it; ``None`` without an index.
        index_defect: why the index cannot be read; empty if it can.
        shards: the safetensors files that are there.
    """

    key: str
    folder: str
    sentences: tuple[str, ...] = ()
    weight_map: Mapping[str, str] | None = None
    index_defect: str = ""
    shards: Mapping[str, Shard] = field(default_factory=dict)


def check_model(examined: Examined) -> Iterator[Finding]:
    """Of the policy, and of the critic where it starts from another model."""
    config = examined.config
    yield from model_findings(model_facts(MODEL_KEY, config.actor_rollout_ref.model.path))
    critic = config.critic.model.path
    if uses_critic(config) and critic and critic != config.actor_rollout_ref.model.path:
        yield from model_findings(model_facts(CRITIC_KEY, critic))


def model_facts(key: str, path: str) -> ModelFacts:
    """Reads the index and the shards' headers."""
    sentences = tuple(one.text for one in model_problems(path, key))
    folder = Path(path)
    if sentences or not path:
        return ModelFacts(key, path, sentences)
    weight_map, defect = _index(folder / INDEX_FILE)
    shards = {file.name: read_shard(file) for file in sorted(folder.glob("*.safetensors"))}
    return ModelFacts(key, path, (), weight_map, defect, shards)


def model_findings(facts: ModelFacts) -> Iterator[Finding]:
    """What is missing, cut short or left over from another download."""
    found = [*_folder(facts), *_shards(facts)]
    yield from found
    if not found:
        size = sum(shard.size_bytes for shard in facts.shards.values())
        tensors = sum(len(shard.tensors) for shard in facts.shards.values())
        count = len(facts.shards)
        yield fine(f"{facts.folder}: {count} file(s) of weights, {tensors} tensors, {gib(size)}")


def _folder(facts: ModelFacts) -> Iterator[Finding]:
    why = "trainer and replicas refuse to start"
    for sentence in facts.sentences:
        yield problem_of_sentence(sentence, why)
    if facts.index_defect:
        what = f"{facts.key}: {INDEX_FILE} cannot be read ({facts.index_defect})"
        yield problem(what, why, _AGAIN)
    elif not facts.sentences and not facts.shards:
        yield problem(
            f"{facts.key} = {facts.folder!r} holds no *.safetensors",
            "weights are read from these only: other formats can run code",
            "take a checkpoint with safetensors, or save the model again with transformers",
        )


def _shards(facts: ModelFacts) -> Iterator[Finding]:
    named = sorted(set((facts.weight_map or {}).values()))
    missing = [name for name in named if name not in facts.shards]
    if missing:
        yield problem(
            f"{facts.key}: {len(missing)} of {len(named)} files that {INDEX_FILE} names are not "
            f"there: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}",
            "the trainer ends while it loads the weights",
            "download the missing files",
        )
    for name, shard in facts.shards.items():
        if shard.defect:
            remedy = "fetch it with git lfs pull" if "git-lfs" in shard.defect else _AGAIN
            yield problem(
                f"{facts.key}: {name} {shard.defect}",
                "the trainer ends while it loads the weights",
                remedy,
            )
            continue
        expected = {tensor for tensor, file in (facts.weight_map or {}).items() if file == name}
        absent = sorted(expected - shard.tensors)
        if absent:
            yield problem(
                f"{facts.key}: {name} lacks {len(absent)} tensor(s) that {INDEX_FILE} places in "
                f"it, such as {absent[0]}",
                "index and files are of two versions of the model",
                "download the whole model again",
            )


def _index(file: Path) -> tuple[Mapping[str, str] | None, str]:
    if not file.is_file():
        return None, ""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Index).weight_map, ""
    except (OSError, msgspec.DecodeError) as error:
        return None, str(error)
