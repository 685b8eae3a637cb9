"""`sluice merge`: write a checkpoint's model as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from sluice.cli.arguments import AsJson
from sluice.cli.terminal import print_json, progress_bars
from sluice.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from sluice.checkpoint.merge import MergeOptions
    from sluice.checkpoint.source import CheckpointSource

_MAX_DIFFERENCES = 20


def merge(  # noqa: PLR0913 - one parameter per option
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder global_step_N, or its actor folder.")
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="New folder for the model.")
    ] = None,
    *,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "keep"],
        typer.Option(help="Type of the weights; keep: as saved."),
    ] = "bfloat16",
    role: Annotated[Literal["actor", "critic"], typer.Option(help="The model to write.")] = "actor",
    compare: Annotated[
        Path | None, typer.Option(help="Hugging Face folder that should hold the same weights.")
    ] = None,
    is_value_model: Annotated[
        bool, typer.Option("--is-value-model", help="The model has a value head (a critic).")
    ] = False,
    tie_word_embedding: Annotated[
        bool, typer.Option("--tie-word-embedding", help="Omit lm_head.weight.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own model code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint in Hugging Face format, for transformers and vLLM.

    Reads sluice's checkpoints, verl's FSDP shards, and adapters, which it adds to their model.
    With --compare the exit code is 1 if weights differ; without OUT nothing is written and DIR
    itself is compared.

    \b
    Examples:
      sluice merge runs/quickstart/checkpoints/global_step_100 merged
      sluice merge checkpoints/dapo/qwen3/global_step_100/actor merged --dtype keep
      sluice merge merged --compare base_model
    """
    if target is None and compare is None:
        raise ConfigError("sluice merge: give a folder to write (OUT), or --compare with one")
    _require_folders_and_torch(checkpoint, compare)
    # Imported here, because torch takes seconds and --help should not.
    from sluice.checkpoint.merge import MergeOptions
    from sluice.checkpoint.source import find_source

    source = find_source(checkpoint, role)
    compared_model = _whole_weights(compare, role) if compare else None
    if target is not None:
        options = MergeOptions(dtype, is_value_model, tie_word_embedding, trust_remote_code)
        _merge(source, target, options, as_json=as_json)
    ours = target or _whole_weights(checkpoint, role)
    differences = _differences(ours, compared_model) if compared_model else None
    if as_json:
        model = None if target is None else str(target)
        print_json({"model": model, "role": source.role, "differences": differences})
    elif differences == []:
        typer.echo(f"the weights equal those of {compare}")
    if differences:
        raise typer.Exit(1)


def _merge(source: CheckpointSource, target: Path, options: MergeOptions, *, as_json: bool) -> None:
    from sluice.checkpoint.merge import merge_checkpoint

    with _show_progress("merging") as on_tensor:
        merge_checkpoint(source, target, options, on_tensor)
    if not as_json:
        dtype = "as saved" if options.dtype == "keep" else options.dtype
        typer.echo(f"{target}: {dtype}, from {source.role}")


def _whole_weights(checkpoint: Path, role: str) -> Path:
    """Return the folder with a checkpoint's weights, in Hugging Face format."""
    from sluice.checkpoint.source import CheckpointFormat, find_source

    source = find_source(checkpoint, role)
    if source.format is not CheckpointFormat.HUGGING_FACE:
        raise CheckpointError(
            f"{checkpoint} holds no whole weights; merge them into a folder first: "
            f"sluice merge {checkpoint} OUT"
        )
    return source.huggingface


def _differences(model: Path, compared_model: Path) -> list[str]:
    """Return the differences between the weights; report them on standard error."""
    from sluice.checkpoint.safetensors_files import compare_weights

    with _show_progress("comparing") as on_tensor:
        differences = compare_weights(model, compared_model, on_tensor)
    for line in differences[:_MAX_DIFFERENCES]:
        typer.echo(line, err=True)
    if len(differences) > _MAX_DIFFERENCES:
        typer.echo(f"... {len(differences) - _MAX_DIFFERENCES} more", err=True)
    return list(differences)


def _require_folders_and_torch(checkpoint: Path, compared: Path | None) -> None:
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder; give a folder global_step_N")
    if compared is not None and not compared.is_dir():
        raise CheckpointError(
            f"--compare {compared}: no such folder; give the folder of a model or of a checkpoint"
        )
    try:
        import safetensors  # noqa: F401 - whether it is installed
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"sluice merge needs {error.name}; run pip install 'sluice[torch]'"
        ) from error


@contextmanager
def _show_progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; yield a function that sets done and total tensors."""
    with progress_bars(Console(stderr=True)) as bars:
        bar = bars.add_task(text, total=None)
        yield lambda num_done, total: bars.update(bar, completed=num_done, total=total)
