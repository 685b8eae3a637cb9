"""`sluice init`: write a commented configuration for the files at hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from sluice.cli.arguments import AsJson, TrustScript, split_arguments
from sluice.cli.terminal import print_json
from sluice.config.catalogue.table import catalogue
from sluice.config.check import launch_notes
from sluice.config.loading.loader import load_config, read_settings
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.loading.yaml_text import flow_text
from sluice.config.problems import Problem
from sluice.errors import ConfigError

_MOST_LOOKED_AT = 200
_MODEL, _TRAIN = "actor_rollout_ref.model.path", "data.train_files"
_VAL, _REWARD = "data.val_files", "reward.custom_reward_function.path"
_ENGINE, _RUN_DIR = "actor_rollout_ref.rollout.name", "sluice.run_dir"
_WIDTH = 99
_FIXED: Mapping[str, object] = {
    "data.train_batch_size": 64,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 2048,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.rollout.n": 8,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.rollout_correction.rollout_is": "token",
    "trainer.total_training_steps": 100,
    "trainer.save_freq": 20,
    "trainer.test_freq": 10,
    "sluice.asynchrony.max_staleness": 1,
    "sluice.rollout.replicas": 1,
}


def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The configuration to write.")
    ] = Path("run.yaml"),
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A launch script of verl, or a file of its key=value lines, to translate.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented run.yaml for the data, model and reward function in this folder.

    It looks for Parquet files, a model's folder and a compute_score function here and one folder
    below, and marks what it does not find.

    \b
    Examples:
      sluice init
      sluice init qwen.yaml --from run_qwen2-7b.sh
    """
    if file.exists() and not force:
        raise ConfigError(f"{file}: exists; name another file, or give --force to replace it")
    notes: Sequence[Problem] = ()
    missing: list[str] = []
    if source is None:
        settings, missing = _guessed(Path(), file.stem)
        tree = SettingsTree()
        for key, value in settings.items():
            tree.set(tuple(key.split(".")), value, tuple(key.split(".")))
    else:
        read_from, overrides = split_arguments([str(source)], trust_script=trust_script)
        tree = read_settings(read_from, overrides)
        notes = launch_notes(load_config(read_from, overrides), tree)
    file.write_text("\n".join(_lines(tree, notes, missing)) + "\n", encoding="utf-8")
    if as_json:
        print_json({"file": str(file), "settings": tree.by_key(), "missing": missing})
        return
    typer.echo(f"wrote {file}")
    for key in missing:
        typer.echo(f"  not found here: {key}; set it in {file}")
    name = shlex.quote(str(file))
    typer.echo(f"next: sluice config check {name}\n      sluice up {name}")


def _guessed(folder: Path, name: str) -> tuple[dict[str, object], list[str]]:
    """Return settings by key for the files in a folder, and the keys for which it has none."""
    parquet = _found(folder, "*.parquet")
    held_out = [one for one in parquet if _is_held_out(one)]
    train = [one for one in parquet if one not in held_out]
    models = [one.parent for one in _found(folder, "config.json")]
    rewards = [one for one in _found(folder, "*.py") if _defines_score(one)]
    has_vllm = find_spec("vllm") is not None
    found: dict[str, Path | None] = {
        _TRAIN: next((one for one in train if "train" in one.name), next(iter(train), None)),
        _VAL: next(iter(held_out), None),
        _MODEL: next(iter(models), None),
    }
    missing = [key for key, path in found.items() if path is None and key != _VAL]
    settings: dict[str, object] = {
        key: str(path) if path is not None else f"set-{key}"
        for key, path in found.items()
        if path is not None or key in missing
    }
    settings |= _FIXED
    if found[_VAL] is None:
        settings["trainer.test_freq"] = -1
    if rewards:
        settings[_REWARD] = str(rewards[0])
    if has_vllm:
        settings[_ENGINE] = "vllm"
    settings[_RUN_DIR] = f"runs/{'mine' if name == 'run' else name}"
    return settings, missing


def _found(folder: Path, pattern: str) -> list[Path]:
    """Return files here and one folder below, the nearest first."""
    here, below = sorted(folder.glob(pattern)), sorted(folder.glob(f"*/{pattern}"))
    found = [*here, *below][:_MOST_LOOKED_AT]
    return [one for one in found if not any(part.startswith(".") for part in one.parts)]


def _is_held_out(file: Path) -> bool:
    return any(word in file.stem.lower() for word in ("test", "val", "dev", "eval", "aime"))


def _defines_score(file: Path) -> bool:
    try:
        return "def compute_score(" in file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _lines(tree: SettingsTree, notes: Sequence[Problem], missing: Sequence[str]) -> Iterator[str]:
    yield "# A run of sluice. The keys are verl's; `sluice config explain KEY` explains each one."
    yield "# Check it: sluice config check FILE. Start it: sluice up FILE."
    said = {note.key: note.text for note in notes}
    parents: tuple[str, ...] = ()
    for path, value in _in_order(tree):
        shared = 0
        while shared < min(len(parents), len(path) - 1) and parents[shared] == path[shared]:
            shared += 1
        if shared == 0:
            yield ""
        for depth in range(shared, len(path) - 1):
            yield f"{'  ' * depth}{path[depth]}:"
        parents = path[:-1]
        indent, key = "  " * len(parents), ".".join(path)
        note = said.get(tree.written(path)) or said.get(key)
        for line in _comment(key, note, is_missing=key in missing):
            yield from wrap(
                line, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
            )
        yield f"{indent}{path[-1]}: {flow_text(value)}"


def _in_order(tree: SettingsTree) -> list[tuple[tuple[str, ...], object]]:
    """Return the settings in the catalogue's order, so that each section is written once."""
    places = {key: place for place, key in enumerate(catalogue())}
    first: dict[tuple[str, ...], int] = {}
    leaves = list(tree.leaves())
    for path, _ in leaves:
        for depth in range(1, len(path) + 1):
            place = places.get(".".join(path), len(places))
            first[path[:depth]] = min(place, first.get(path[:depth], place))

    def rank(leaf: tuple[tuple[str, ...], object]) -> list[tuple[int, str]]:
        path = leaf[0]
        return [(first[path[:depth]], path[depth - 1]) for depth in range(1, len(path) + 1)]

    return sorted(leaves, key=rank)


def _comment(key: str, note: str | None, *, is_missing: bool) -> Iterator[str]:
    entry = catalogue().get(key)
    if is_missing:
        yield "NOT FOUND HERE: set this path."
    if entry is not None and entry.meaning:
        yield entry.meaning.partition(". ")[0].rstrip(".")
    if note is not None:
        yield note
