"""Find recipes, and read what their folders say.

A recipe is a folder with a `README.md`, a `run.yaml` with the keys of a published run, and a
`tiny.yaml` with what the run in small has instead.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sluice
from sluice.errors import ConfigError

README, RUN, TINY = "README.md", "run.yaml", "tiny.yaml"


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
    found = [package / "recipes", *(folder / "share/sluice/recipes" for folder in installed)]
    for folder in found:
        if any(folder.glob(f"*/{RUN}")):
            return folder
    raise ConfigError(
        f"recipes: none in {', '.join(map(str, found))}; install sluice from its wheel or checkout"
    )


def all_recipes() -> Sequence[Recipe]:
    """Return all recipes by name.

    Raises:
        ConfigError: as `recipes_folder`.
    """
    return [Recipe(file.parent) for file in sorted(recipes_folder().glob(f"*/{RUN}"))]


def recipe_named(name: str) -> Recipe:
    """Return a recipe.

    Raises:
        ConfigError: none has the name.
    """
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    if name not in recipes:
        raise ConfigError(f"recipe: {name!r} is unknown; choose one of {', '.join(recipes)}")
    return recipes[name]
