"""Tiny models whose gradients on several ranks are compared with those of transformers on one."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from tests.support import tiny_vision
from tests.support.gradient_peer import GradientsAsked, Pass, PassFound
from tests.support.image_parity import plain_with_images
from tests.support.layer_parity import (
    Gradients,
    plain,
    plain_adapters,
    random_adapter,
    worst_error,
)
from tests.support.saved_adapter import write_adapter
from tests.support.tiny_policy import make_model, save_model
from tests.support.trainer_ranks import ranks_of


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model's folder, that of an adapter to train instead of it, and the gradients by
    transformers' own modules, of each row alone.
    """

    folder: Path
    adapter: Path | None
    expected: Gradients


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """`worst_error` of a pass, and the answers of its ranks."""

    error: float
    ranks: list[PassFound]


@cache
def made_subject(family: str, *, adapts: bool = False, **changes: Any) -> Subject:
    """A tiny model with random weights; `changes` are of its config.json.

    A process of tests makes each once: its gradients take as long as those of a rank.
    """
    scratch = _scratch()
    folder = save_model(scratch / "model", family, **changes)
    model = make_model(family, **changes)
    if not adapts:
        return Subject(folder, None, plain(model, with_entropy=True)[1])
    adapter = random_adapter(model)
    write_adapter(scratch / "adapter", adapter)
    return Subject(folder, scratch / "adapter", plain_adapters(model, adapter))


def _scratch() -> Path:
    folder = mkdtemp()
    atexit.register(rmtree, folder)
    return Path(folder)


@cache
def made_image_subject(family: str, **changes: Any) -> Subject:
    """A tiny vision-language model, made once; `changes` are of its language model."""
    folder = _scratch() / "model"
    model = tiny_vision.save_model(family, folder, **changes)
    return Subject(folder, None, plain_with_images(folder, model))


def compare(
    world_size: int,
    layout: dict[str, int],
    passes: Sequence[tuple[Subject, bool]],
    scratch: Path,
    cut: dict[str, int] | None = None,
) -> list[Compared]:
    """Make passes in one group of real ranks.

    Args:
        layout: keys of FSDP's section.
        passes: the subject, and whether its layers are recomputed.
        scratch: for the gradients' files.
        cut: keys that cut stages.
    """
    files = [scratch / f"gradients-{number}" for number in range(len(passes))]
    asked = GradientsAsked(
        layout,
        [
            Pass(str(one.folder), str(file), recomputes, one.adapter and str(one.adapter))
            for (one, recomputes), file in zip(passes, files, strict=True)
        ],
        cut or {},
    )
    arguments = msgspec.to_builtins(asked)
    with ranks_of("tests.support.gradient_peer", world_size, arguments) as ranks:
        answers = [[msgspec.convert(r.answer(), PassFound) for r in ranks] for _ in passes]
    errors = [
        worst_error(_of_stages(file), one.expected)
        for (one, _), file in zip(passes, files, strict=True)
    ]
    return [Compared(*found) for found in zip(errors, answers, strict=True)]


def _of_stages(file: Path) -> Gradients:
    """What the stages wrote; what two of them hold is equal."""
    found: Gradients = {}
    for one in sorted(file.parent.glob(f"{file.name}-*")):
        for name, gradient in load_file(one).items():
            assert name not in found or torch.equal(found[name], gradient), name
            found[name] = gradient
    return found
