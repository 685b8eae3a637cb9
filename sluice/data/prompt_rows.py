"""One row of verl's data format, checked: columns once per file, values row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short_repr  # bounded, however deep or long a value is

import pyarrow as pa

from sluice.algorithm.episode_rules import AGENT_NAME
from sluice.data.image_sources import ImageSource, image_source
from sluice.errors import DataError
from sluice.types import IMAGE_MARK, ChatMessage

GROUND_TRUTH = "ground_truth"
UNREAD_KEYS = ("tool_calls", "reasoning_content")
"""Keys of a message that chat templates write; rows with a value there would lose it."""
UNREAD_MEDIA = ("videos", "audios")
"""verl's columns of media that no run reads; rows that hold some are refused."""
IMAGE_RUNS = "use a model of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, without a critic"
"""The runs that read images, for refusals."""


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Names of columns.

    Rows are read with images only if `images` names their column; rows that hold some in the
    column `refused_images` are refused. `renamed_by`: the keys or options that name the first two,
    for errors.
    """

    prompt: str = "prompt"
    data_source: str = "data_source"
    reward_model: str = "reward_model"
    extra_info: str = "extra_info"
    agent_name: str = AGENT_NAME
    images: str | None = None
    refused_images: str | None = None
    renamed_by: tuple[str, str] = ("data.prompt_key", "data.reward_fn_key")

    @classmethod
    def of(cls, prompt: str, data_source: str, images: str, *, with_images: bool) -> PromptColumns:
        """Return the columns of a configuration; without images, rows that hold some are refused.

        Args:
            prompt: `data.prompt_key`.
            data_source: `data.reward_fn_key`.
            images: `data.image_key`; empty: there is no such column.
            with_images: whether the run reads images.
        """
        if with_images:
            return cls(prompt, data_source, images=images or None)
        return cls(prompt, data_source, refused_images=images or None)

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns without which a file cannot be used."""
        return (self.prompt, self.data_source, self.reward_model)

    def present(self, names: list[str]) -> tuple[str, ...]:
        """Return the columns to read of a file with the columns `names`."""
        optional = [self.extra_info, self.agent_name, *([self.images] if self.images else [])]
        return (*self.needed, *(name for name in optional if name in names))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """The content of a row. `place` is its file and number, from 0, for messages.

    `extra_info` holds the column `agent_name`, too, where a row has one. `truth_is_json`: the row
    holds another value than text, and `ground_truth` is its JSON.
    """

    messages: tuple[ChatMessage, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)
    place: str = ""
    images: tuple[ImageSource, ...] = ()
    truth_is_json: bool = False


def check_column_names(path: str, names: list[str], columns: PromptColumns) -> tuple[str, ...]:
    """Return the columns to read.

    Raises:
        DataError: a column is missing; names file, column, known columns and remedy.
    """
    for name in columns.needed:
        if name not in names:
            raise DataError(
                f"{path}: no column '{name}' (found: {', '.join(names)}); add "
                f"it{_renaming_hint(name, columns)}; 'sluice data prepare' converts published "
                "data sets"
            )
    return columns.present(names)


def _renaming_hint(name: str, columns: PromptColumns) -> str:
    keys = dict(zip((columns.prompt, columns.data_source), columns.renamed_by, strict=True))
    return f", or name yours with {keys[name]}" if name in keys else ""


def check_columns(path: str, schema: pa.Schema, columns: PromptColumns) -> tuple[str, ...]:
    """Return the columns to read.

    Raises:
        DataError: a column is missing or of another type; names file, column and remedy.
    """
    names = check_column_names(path, schema.names, columns)
    column_types: dict[str | None, tuple[Callable[[pa.DataType], bool], str]] = {
        columns.prompt: (
            lambda kind: _is_list(kind) and _has_text(kind.value_type, "role", "content"),
            "a list of {role, content} structs of strings; "
            'write [{"role": "user", "content": TEXT}] in each row',
        ),
        columns.data_source: (_is_text, "a string; convert it"),
        columns.reward_model: (
            lambda kind: pa.types.is_struct(kind) and kind.get_field_index(GROUND_TRUTH) >= 0,
            f"a struct with a '{GROUND_TRUTH}'; add it",
        ),
        columns.images: (
            lambda kind: _is_list(kind) or pa.types.is_null(kind),
            "a list of {bytes, path} structs or of paths; convert it",
        ),
    }
    for name in names:
        fits, text = column_types.get(name, (lambda _: True, ""))
        if not fits(kind := schema.field(name).type):
            raise DataError(f"{path}: column '{name}' is {kind}, not {text}")
    return names


def decode_row(
    values: Mapping[str, object], columns: PromptColumns, *, path: str, row: int
) -> PromptRow:
    """Read a row's values, as Arrow or JSON gives them to Python.

    Raises:
        DataError: a value is missing or of another type; names file, row and remedy.
    """
    place = f"{path}, row {row}"
    turns = values.get(columns.prompt)
    if turns is None or turns == []:
        raise _row_error(place, f"'{columns.prompt}' holds no message")
    if not isinstance(turns, list):
        kind = type(turns).__name__
        raise _row_error(place, f"'{columns.prompt}' is a {kind}, not a list of messages")
    truth = truth_of(values.get(columns.reward_model))
    text = truth_text(truth)
    if text is None:
        problem = f"'{columns.reward_model}.{GROUND_TRUTH}' is {short_repr(truth)}, not a string"
        raise _row_error(place, f"{problem} or another value of JSON")
    data_source = values.get(columns.data_source)
    if not isinstance(data_source, str) or not data_source:
        raise _row_error(place, f"'{columns.data_source}' is {short_repr(data_source)}, not a name")
    extra_info = values.get(columns.extra_info)
    if extra_info is not None and not isinstance(extra_info, dict):
        shown_value = short_repr(extra_info)
        raise _row_error(place, f"'{columns.extra_info}' is {shown_value}, not a mapping")
    agent = values.get(columns.agent_name)
    if agent is not None and not isinstance(agent, str):
        raise _row_error(place, f"'{columns.agent_name}' is {short_repr(agent)}, not a name")
    if agent:
        extra_info = {**(extra_info or {}), AGENT_NAME: agent}
    _refuse_media(values, columns, place)
    messages = tuple(_message(turn, place, columns.prompt) for turn in turns)
    images = _images(values, columns, messages, place)
    is_json = not isinstance(truth, str)
    return PromptRow(messages, data_source, text, extra_info or {}, place, images, is_json)


def truth_of(reward_model: object) -> object:
    """Return the ground truth that a row's `reward_model` holds; ``None``: there is none."""
    return reward_model.get(GROUND_TRUTH) if isinstance(reward_model, Mapping) else None


def truth_text(truth: object, *, sorts_keys: bool = False) -> str | None:
    """Return a ground truth as text: itself, or its JSON; ``None``: it is neither, or null.

    With `sorts_keys` mappings that are equal have the same text.
    """
    if truth is None or isinstance(truth, str):
        return truth
    try:
        return json.dumps(truth, ensure_ascii=False, allow_nan=False, sort_keys=sorts_keys)
    except (TypeError, ValueError, RecursionError):
        return None


def _refuse_media(values: Mapping[str, object], columns: PromptColumns, place: str) -> None:
    if columns.refused_images and values.get(columns.refused_images):
        raise images_error(place, columns.refused_images)
    for name in UNREAD_MEDIA:
        if name != columns.images and values.get(name):
            raise media_error(place, name)


def images_error(place: str, column: str) -> DataError:
    """Return the error for a row with images if model, engine or critic read text alone."""
    return DataError(
        f"{place} holds images (column '{column}'), and this run is text-only; give a data set "
        f"without images, or {IMAGE_RUNS}"
    )


def media_error(place: str, column: str) -> DataError:
    """Return the error for a row with videos or sound."""
    return DataError(
        f"{place} holds {column}, and no run reads them; give a data set without them, or remove "
        f"the column '{column}' if the prompts mean the same without it"
    )


def _message(turn: object, place: str, column: str) -> ChatMessage:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if not isinstance(role, str) or not role or not isinstance(content, str):
        raise _row_error(
            place,
            f"'{column}' holds a message without role or content as text: {short_repr(turn)}",
        )
    assert isinstance(turn, Mapping)
    if unread_keys := [key for key in UNREAD_KEYS if turn.get(key)]:
        raise _row_error(
            place,
            f"'{column}' holds a message with {unread_keys[0]}, and only role and content are read"
            f": {short_repr(turn)}",
        )
    return ChatMessage(role, content)


def _images(
    values: Mapping[str, object],
    columns: PromptColumns,
    messages: tuple[ChatMessage, ...],
    place: str,
) -> tuple[ImageSource, ...]:
    if columns.images is None or columns.images not in values:
        return ()
    column, images_of_row = columns.images, values.get(columns.images) or []
    if not isinstance(images_of_row, list):
        kind = type(images_of_row).__name__
        raise _row_error(place, f"'{column}' is a {kind}, not a list of images")
    images = tuple(_image(image, index, column, place) for index, image in enumerate(images_of_row))
    marks = sum(message.content.count(IMAGE_MARK) for message in messages)
    if marks != len(images):
        raise _row_error(
            place, f"its messages hold {marks} times {IMAGE_MARK}, '{column}' {len(images)} images"
        )
    return images


def _image(value: object, index: int, column: str, place: str) -> ImageSource:
    try:
        return image_source(value)
    except ValueError as error:
        raise _row_error(place, f"'{column}[{index}]' {error}") from error


def _row_error(place: str, problem: str) -> DataError:
    return DataError(f"{place}: {problem}; repair the row or remove it")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _has_text(kind: pa.DataType, *fields: str) -> bool:
    if not pa.types.is_struct(kind):
        return False
    types = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return all(name in types and _is_text(types[name]) for name in fields)
