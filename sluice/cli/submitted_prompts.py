"""The file of prompts that `sluice submit` takes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from sluice.cli.row_files import read_rows
from sluice.client.images import Image
from sluice.client.policy_client import NewPrompt
from sluice.data.image_sources import image_source
from sluice.errors import DataError
from sluice.types import ChatMessage

_NEEDS = (
    "prompt ([{role, content}]), data_source and ground_truth (or reward_model.ground_truth), each "
    "a text; prompt_id, extra_info and images (paths, data: URIs or {bytes, path}) are optional"
)
_STEM_LENGTH, _DIGEST_BYTES = 64, 8


class _Turn(msgspec.Struct):
    role: str
    content: str


class _RewardModel(msgspec.Struct):
    ground_truth: str


class _Row(msgspec.Struct):
    prompt: list[_Turn]
    data_source: str
    ground_truth: str | None = None
    reward_model: _RewardModel | None = None
    prompt_id: str | None = None
    extra_info: dict[str, Any] | None = None
    images: list[Any] | None = None


def read_prompts(file: Path) -> list[NewPrompt]:
    """Reads prompts to submit: JSON lines or parquet, as for training or with `ground_truth` flat.

    A row without `prompt_id` gets one of the file's name, the row's place and content, so that the
    same file given again is the same prompts.

    Raises:
        DataError: naming the file, the line or row and what is wrong with it.
    """
    return [_prompt(file, place, row) for place, row in read_rows(file, _Row, _NEEDS)]


def _prompt(file: Path, place: str, row: _Row) -> NewPrompt:
    answer = row.ground_truth
    if answer is None:
        if row.reward_model is None:
            raise DataError(f"{file}, {place}: no ground_truth; a row needs {_NEEDS}")
        answer = row.reward_model.ground_truth
    return NewPrompt(
        row.prompt_id or _made_id(file, place, row),
        tuple(ChatMessage(turn.role, turn.content) for turn in row.prompt),
        row.data_source,
        answer,
        row.extra_info or {},
        tuple(_image(file, place, index, one) for index, one in enumerate(row.images or ())),
    )


def _image(file: Path, place: str, index: int, found: object) -> Image:
    """The bytes of an image, or where they are: relative paths are beside the file."""
    try:
        source = image_source(found)
    except ValueError as error:
        raise DataError(f"{file}, {place}: images[{index}] {error}") from error
    return source if isinstance(source, bytes) else file.parent / source


def _made_id(file: Path, place: str, row: _Row) -> str:
    fields = msgspec.structs.asdict(row)
    if not row.images:  # as before rows could have any: the same file is the same prompts
        del fields["images"]
    digest = hashlib.blake2b(msgspec.json.encode(fields), digest_size=_DIGEST_BYTES).hexdigest()
    stem = "".join(c if c.isascii() and c.isprintable() else "_" for c in file.stem[:_STEM_LENGTH])
    return f"{stem}:{place.replace(' ', '-')}:{digest}"
