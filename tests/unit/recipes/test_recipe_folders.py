"""Each recipe keeps the keys of its document, and its run in small changes sizes alone."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePath

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.loading.loader import KeySettings, load_config, read_settings
from sluice.config.memory.shape import ModelShape, published_name, published_shape
from sluice.config.problems import errors
from sluice.config.rules.checks import all_problems
from sluice.errors import ConfigError
from sluice.quickstart.arithmetic import TASKS, split_problems, write_dataset
from sluice.recipes.folders import (
    Recipe,
    RecipeAssets,
    all_recipes,
    file_overrides,
    find_recipe,
    recipes_folder,
    small_run,
)
from sluice.recipes.made_files import make_files, write_contest
from tests.support.source_tree import ROOT

LAUNCHES = ROOT / "tests" / "data" / "launches"
# The list of keys of a recipe's document.
DOCUMENTS = {
    "adpo-4x4090": "adpo-4x4090",
    "dapo-qwen3-vl-30b-npu": "dapo-qwen3-vl-30b-fsdp2-npu",
    "dianjin-qwen3-8b-npu": "dapo-qwen3-8b-dianjin-npu",
    "grpo-8xa100": "grpo-8xa100",
    "dapo-qwen3-235b": "dapo-qwen3-235b-megatron",
    "dapo-qwen3-32b-npu": "dapo-qwen3-32b-fsdp2-npu",
    "grpo-qwen2.5-7b": "grpo-qwen2.5-7b-megatron-kl",
    "grpo-qwen2.5-7b-kl": "grpo-qwen2.5-7b-megatron-kl",
}
# What is of this machine, and not of the document.
PLACES = (
    "data.train_files",
    "actor_rollout_ref.model.path",
    "reward.custom_reward_function.path",
    "trainer.default_local_dir",
)
# A run in small has other sizes, but not another algorithm.
ALGORITHM = (
    "algorithm.",
    "reward.reward_manager.",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_",
)
RECIPES = all_recipes()
SMALL = [recipe for recipe in RECIPES if recipe.tiny.is_file()]


def name_of(recipe: Recipe) -> str:
    return recipe.name


def settings_of(path: Path, overrides: tuple[str, ...] = ()) -> Mapping[str, object]:
    return read_settings(path, list(overrides)).by_key()


def shape_of_run(recipe: Recipe) -> ModelShape | None:
    model = load_config(recipe.run, []).actor_rollout_ref.model.path.rpartition("/")[2]
    return published_shape(model) if published_name(model) else None


def test_the_checkouts_recipes_are_listed_by_name() -> None:
    result = CliRunner().invoke(commands, ["recipe", "list"])
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.splitlines()[1:] if line]
    assert listed == [recipe.name for recipe in RECIPES]
    assert recipes_folder() == ROOT / "recipes"


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'dapo-qwen3' is unknown; choose one of .*-qwen3-235b"):
        find_recipe("dapo-qwen3")


def test_a_recipes_configuration_is_shown_as_its_file_is() -> None:
    recipe = find_recipe("dapo-qwen3-32b-npu")
    result = CliRunner().invoke(commands, ["recipe", "show", recipe.name, "--config"])
    assert result.output == recipe.run.read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipes_run_breaks_no_rule(recipe: Recipe) -> None:
    config = load_config(recipe.run, [])
    settings = KeySettings(config, settings_of(recipe.run))
    broken = all_problems(config, settings, shape=shape_of_run(recipe), files=False)
    assert [one for one in broken if one.rule != "engine-replicas"] == []


@pytest.mark.parametrize(("name", "launch"), DOCUMENTS.items())
def test_a_value_that_is_not_the_documents_is_named_in_the_readme(name: str, launch: str) -> None:
    recipe = find_recipe(name)
    document = settings_of(LAUNCHES / f"{launch}.overrides")
    ours = settings_of(recipe.run)
    assert [key for key in document if key not in ours and key not in PLACES] == []
    _, _, deviations = recipe.readme.partition("## Deviations")
    named = [*PLACES, "sluice", *re.findall(r"`([\w.]+)`", deviations)]
    changed = [key for key, value in ours.items() if document.get(key) != value]
    assert [key for key in changed if not any(f"{key}.".startswith(f"{n}.") for n in named)] == []


@pytest.mark.parametrize("recipe", SMALL, ids=name_of)
def test_a_run_in_small_has_the_algorithm_of_the_whole_run(recipe: Recipe) -> None:
    _, small = small_run(recipe)
    whole, tiny = settings_of(recipe.run), settings_of(recipe.run, tuple(small))
    changed = [key for key, value in whole.items() if tiny.get(key) != value]
    assert [key for key in changed if key.startswith(ALGORITHM)] == []
    assert whole.keys() <= tiny.keys()


@pytest.mark.parametrize("recipe", SMALL, ids=name_of)
def test_a_run_in_small_breaks_no_rule(recipe: Recipe) -> None:
    _, small = small_run(recipe)
    config = load_config(recipe.run, small)
    settings = KeySettings(config, settings_of(recipe.run, tuple(small)))
    # The made model is of the same kind.
    broken = all_problems(config, settings, shape=shape_of_run(recipe), files=False)
    assert [one for one in errors(broken) if one.rule != "engine-replicas"] == []
    actor = config.actor_rollout_ref.actor
    ratio = config.data.train_batch_size // actor.ppo_mini_batch_size
    whole = load_config(recipe.run, [])
    of_whole = whole.data.train_batch_size // whole.actor_rollout_ref.actor.ppo_mini_batch_size
    assert ratio == of_whole, "updates for each batch"


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_wheel_has_every_file_of_a_recipe(recipe: Recipe) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["data-files"]
    tracked = ("git", "ls-files", "--cached", "--others", "--exclude-standard", recipe.folder)
    found = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True)
    for file in map(PurePath, found.stdout.split()):
        patterns = listed.get(f"share/sluice/{file.parent}", [])
        assert any(file.match(pattern) for pattern in patterns), file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "dapo-qwen3-32b-npu", "--tiny", "--on", "ray"), "takes one machine"),
        (("run", "dapo-qwen3-32b-npu", "--tiny", "trainer.nnode=2"), "unknown key"),
        (("run", "dapo-qwen3-32b-npu", "--seed", "3"), "--seed 3: without --tiny"),
        (("show", "dapo-qwen3-32b-npu", "--tiny", "--config"), "contradict each other"),
    ],
)
def test_a_mistake_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(commands, ["recipe", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def recipe_at(folder: Path, run: str = "", tiny: str | None = None) -> Recipe:
    folder.mkdir()
    (folder / "run.yaml").write_text(run, encoding="utf-8")
    if tiny is not None:
        (folder / "tiny.yaml").write_text(tiny, encoding="utf-8")
    return Recipe(folder)


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (None, "has no tiny.yaml; leave out --tiny"),
        ("trainer: {nnodes: 1}", "section made: .*give a task"),
        ("made: {tusk: quickstart}", "section made: .*tusk"),
    ],
)
def test_a_tiny_file_that_is_missing_or_wrong_is_named(
    tmp_path: Path, tiny: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_run(recipe_at(tmp_path / "mine", tiny=tiny))


def test_files_of_the_folder_are_found_from_any_other(tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path / "mine", "sluice: {environment: {path: tools.py}}")
    assert file_overrides(recipe) == []
    (recipe.folder / "tools.py").touch()
    assert file_overrides(recipe) == [f"sluice.environment.path={recipe.folder / 'tools.py'}"]


def test_a_tiny_file_wins_over_what_all_have(tmp_path: Path) -> None:
    recipe = recipe_at(
        tmp_path / "mine", "", "{made: {task: quickstart}, sluice: {rollout: {replicas: 2}}}"
    )
    made, small = small_run(recipe)
    config = load_config(recipe.run, small)
    assert made == RecipeAssets("quickstart")
    assert (config.sluice.rollout.replicas, config.sluice.rollout.device) == (2, "cpu")


def test_the_contest_has_each_of_the_longest_held_out_problems_so_many_times(
    tmp_path: Path,
) -> None:
    held_out = split_problems(TASKS["quickstart"], 0, 1, 128).held_out
    write_dataset(tmp_path / "test.parquet", held_out, "test")
    write_contest(tmp_path / "test.parquet", tmp_path / "contest.parquet", 4)
    rows = pq.read_table(tmp_path / "contest.parquet").to_pylist()
    truths = [row["extra_info"]["index"] for row in rows]
    assert len(rows) == 120
    assert truths[:30] * 4 == truths
    assert len(set(truths)) == 30
    assert {row["extra_info"]["num_terms"] for row in rows} == {5}
    assert {row["data_source"] for row in rows} == {"aime_2024_like"}


PROGRAM = """
from pathlib import Path

def make(folder, seed):
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    log = folder / "calls"
    log.write_text(log.read_text() + "+" if log.exists() else "+")
    for name in ("data/train.parquet", "data/test.parquet", "model/config.json"):
        (folder / name).write_text(str(seed))
"""


@pytest.mark.parametrize("name", ["assets", r"a\,b, c's [1]"])
def test_a_recipes_program_makes_files_once_for_a_seed(tmp_path: Path, name: str) -> None:
    recipe = recipe_at(tmp_path / "mine")
    (recipe.folder / "made.py").write_text(PROGRAM, encoding="utf-8")
    folder = tmp_path / name
    for seed in (1, 1, 2):
        made = make_files(recipe, RecipeAssets("made.py"), folder, seed, lambda _: None)
    assert (folder / "calls").read_text() == "++"
    config = load_config(None, made)
    assert config.actor_rollout_ref.model.path == str(folder / "model")
    assert config.data.train_files == str(folder / "data" / "train.parquet")
    assert config.data.val_files == [str(folder / "data" / "test.parquet")]


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"made.task: no file .*made.py; name a task"):
        make_files(
            recipe_at(tmp_path / "mine"), RecipeAssets("made.py"), tmp_path, 0, lambda _: None
        )
