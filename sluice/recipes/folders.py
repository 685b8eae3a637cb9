"""Find recipes, and read what their folders say.

A recipe is a folder with a `README.md`, a `run.yaml` with the keys of a published run, and a
`tiny.yaml` with what the run in small has instead: the keys that differ, such as sizes and lengths,
and a section `made` for model and data. Every other key of the run applies as it is.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

import sluice
from sluice.config.loading.override_values import format_override_value
from sluice.config.loading.yaml_files import read_document
from sluice.config.loading.yaml_text import flat_tree, parse_document
from sluice.errors import ConfigError

README, RUN, TINY = "README.md", "run.yaml", "tiny.yaml"
MADE = "made"
ON_TWO_CORES = "on_two_cores.yaml"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A folder that holds a recipe."""

    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def run(self) -> Path:
        """The configuration of the whole run."""
        return self.folder / RUN

    @property
    def tiny(self) -> Path:
        """What the run in small has instead; the file need not be there."""
        return self.folder / TINY

    @property
    def readme(self) -> str:
        """The text that describes it."""
        return (self.folder / README).read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """The first line of its README."""
        return self.readme.partition("\n")[0].lstrip("# ")


def recipes_folder() -> Path:
    """Return the folder of all recipes: of the checkout, else of the installed package.

    Raises:
        ConfigError: there is none.
    """
    package = Path(sluice.__file__).parent.parent
    # `pip install --target` puts the second one beside the package.
    installed = (package, Path(sysconfig.get_path("data")))
    folders = [package / "recipes", *(folder / "share/sluice/recipes" for folder in installed)]
    for folder in folders:
        if any(folder.glob(f"*/{RUN}")):
            return folder
    raise ConfigError(
        f"recipes: none in {', '.join(map(str, folders))}; install sluice from its wheel "
        "or checkout"
    )


def all_recipes() -> Sequence[Recipe]:
    """Return all recipes by name.

    Raises:
        ConfigError: as `recipes_folder`.
    """
    return [Recipe(file.parent) for file in sorted(recipes_folder().glob(f"*/{RUN}"))]


def find_recipe(name: str) -> Recipe:
    """Return a recipe.

    Raises:
        ConfigError: none has the name.
    """
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    if name not in recipes:
        raise ConfigError(f"recipe: {name!r} is unknown; choose one of {', '.join(recipes)}")
    return recipes[name]


class RecipeAssets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The made model and data.

    Attributes:
        task: of the quickstart, or a Python file of the recipe's folder with a function
            ``make(folder, seed)``. It writes `model/`, `data/train.parquet` and
            `data/test.parquet` into the folder.
        contest_copies: rows of each problem in a second validation file, `data/contest.parquet`:
            30 of the longest held-out problems, as AIME 2024 has. 0: no such file.
    """

    task: str
    contest_copies: int = 0


def small_run(recipe: Recipe) -> tuple[RecipeAssets, list[str]]:
    """Return what is made, and the overrides that make the run of `run.yaml` small.

    Raises:
        ConfigError: the recipe has no `tiny.yaml`, or a wrong one.
    """
    if not recipe.tiny.is_file():
        raise ConfigError(
            f"recipe {recipe.name}: has no {recipe.tiny.name}; leave out --tiny, or take another"
        )
    document = dict(read_document(recipe.tiny))
    try:
        assets = msgspec.convert(document.pop(MADE, None), RecipeAssets)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{recipe.tiny}: section {MADE}: {error}; give a task, such as {MADE}: "
            "{task: quickstart}"
        ) from error
    name = f"{__package__}/{ON_TWO_CORES}"
    common = (files("sluice.recipes") / ON_TWO_CORES).read_text(encoding="utf-8")
    settings = flat_tree(parse_document(common, name)) | flat_tree(document)
    overrides = file_overrides(recipe)
    return assets, [*overrides, *(_override(recipe, *setting) for setting in settings.items())]


def file_overrides(recipe: Recipe) -> list[str]:
    """Return overrides for the values of `run.yaml` that name a file of the recipe's folder.

    They hold whichever folder a run starts in.
    """
    settings = flat_tree(read_document(recipe.run))
    return [
        _override(recipe, key, value)
        for key, value in settings.items()
        if _is_in_folder(recipe.folder, value)
    ]


def _override(recipe: Recipe, key: str, value: object) -> str:
    if _is_in_folder(recipe.folder, value):
        value = str((recipe.folder / str(value)).absolute())
    return f"{key}={format_override_value(value)}"


def _is_in_folder(folder: Path, value: object) -> bool:
    return isinstance(value, str) and bool(value) and (folder / value).is_file()
