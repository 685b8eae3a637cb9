"""The model's folder: configuration, tokenizer, and every shard of its weights, whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.config.derived import uses_critic
from sluice.config.file_checks import MODEL_KEY, model_problems
from sluice.doctor.byte_sizes import gib
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, problem_of_sentence
from sluice.doctor.safetensors_header import Shard, read_shard

INDEX_FILE = "model.safetensors.index.json"
CRITIC_KEY = "critic.model.path"
DEADLINE_S = 60.0  # hundreds of shards on a file server
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
    sentences = tuple(one.replace(MODEL_KEY, key) for one in model_problems(path))
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
