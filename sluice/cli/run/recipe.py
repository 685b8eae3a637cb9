"""`sluice recipe`: list the published runs that have a recipe, show one, and start it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sluice.cli.arguments import AsJson, Overrides
from sluice.cli.run.quickstart import mark_run_folder, show_preparation, start_at_zero
from sluice.cli.run.up import (
    Display,
    On,
    Quiet,
    RayAddress,
    ShowLogs,
    display_from_options,
    ray_options,
    run_configured,
)
from sluice.cli.running_run import folder_setting
from sluice.cli.terminal import output_console, print_json, print_table
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from sluice.recipes.folders import Recipe, all_recipes, file_overrides, find_recipe, small_run

_SEEDED = ("data.seed", "actor_rollout_ref.rollout.seed", "trainer.seed")
_CAPACITY_TIMEOUT_S = 300.0

recipe_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start published runs, in full or in small.\n\n"
    "\b\nExample:\n  sluice recipe run dapo-qwen3-32b-npu --tiny",
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name from the list.", show_default=False)
]


@recipe_commands.command("list")
def list_recipes(*, as_json: AsJson = False) -> None:
    """List the recipes.

    \b
    Example:
      sluice recipe list
    """
    recipes = all_recipes()
    if as_json:
        print_json([_as_json(recipe) for recipe in recipes])
        return
    rows = [(recipe.name, recipe.title) for recipe in recipes]
    print_table(output_console(), "", ("recipe", "run"), rows)


def _as_json(recipe: Recipe) -> dict[str, object]:
    return {
        "name": recipe.name,
        "title": recipe.title,
        "folder": str(recipe.folder.absolute()),
        "tiny": recipe.tiny.is_file(),
    }


@recipe_commands.command("show")
def show(
    name: Name,
    *,
    config: Annotated[bool, typer.Option("--config", help="Print its run.yaml instead.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Print its tiny.yaml instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a recipe's README: hardware, commands, what to expect, deviations.

    \b
    Examples:
      sluice recipe show dapo-qwen3-32b-npu
      sluice recipe show dapo-qwen3-32b-npu --config > run.yaml
    """
    recipe = find_recipe(name)
    if config and tiny:
        raise ConfigError("--config and --tiny contradict each other; leave one of them out")
    text = recipe.readme
    if config or tiny:
        text = (recipe.tiny if tiny else recipe.run).read_text(encoding="utf-8")
    if as_json:
        print_json(_as_json(recipe) | {"text": text})
    else:
        typer.echo(text, nl=False)


@recipe_commands.command("run")
def run(  # noqa: PLR0913 - options of the command
    name: Name,
    overrides: Overrides = None,
    *,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Make a tiny model and data, and train it on two cores.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="With --tiny: of data, model and sampling.", show_default="0"),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run", help="Folder for all files.", show_default="runs/NAME"),
    ] = None,
    logs: ShowLogs = False,
    quiet: Quiet = False,
    on: On = "local",
    ray_address: RayAddress = "auto",
    as_json: AsJson = False,
) -> None:
    """Start the run of a recipe, as `sluice up` does; with --tiny, in small.

    The whole run needs the recipe's devices, model and data: its paths are relative to the current
    folder. In small it needs no network and no GPU, and replaces the results of an earlier one.

    \b
    Examples:
      sluice recipe run dapo-qwen3-32b-npu --tiny
      sluice recipe run dapo-qwen3-32b-npu --on ray data.train_files=data/mine.parquet
    """
    began_s = time.monotonic()
    recipe = find_recipe(name)
    display = display_from_options(logs=logs, quiet=quiet, as_json=as_json)
    if tiny:
        if on != "local":
            raise ConfigError("--on ray: a run in small takes one machine; leave one of both out")
        folder = run_dir or Path("runs") / f"{name}-tiny"
        _run_small(recipe, folder, seed or 0, overrides or [], display, began_s)
    if seed is not None:
        keys = " ".join(f"{key}={seed}" for key in _SEEDED)
        raise ConfigError(f"--seed {seed}: without --tiny it has no effect; set {keys}")
    folder_settings = [] if run_dir is None else [folder_setting(run_dir)]
    settings = [*file_overrides(recipe), *folder_settings, *(overrides or [])]
    ray = ray_options(on, ray_address, None, _CAPACITY_TIMEOUT_S)
    run_configured((recipe.run, settings), display, ray)


def _run_small(
    recipe: Recipe,
    run_dir: Path,
    seed: int,
    overrides: list[str],
    display: Display,
    began_s: float,
) -> NoReturn:
    made_files, small = small_run(recipe)
    load_config(recipe.run, [*small, *overrides])  # reports mistakes before anything is made
    mark_run_folder(run_dir)
    try:
        from sluice.recipes.made_files import make_files
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--tiny needs PyTorch and transformers, and {error.name} is not installed; "
            "pip install 'sluice[torch]'"
        ) from error
    with show_preparation(display.console) as show_progress:
        files = make_files(recipe, made_files, run_dir / "assets", seed, show_progress)
    seeds = [f"{key}={seed}" for key in _SEEDED]
    settings = [*small, *files, folder_setting(run_dir), *seeds, *overrides]
    start_at_zero(recipe.run, settings, display, began_s)
