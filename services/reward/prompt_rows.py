"""One row of verl's parquet format, checked: columns once per file, values row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from sluice.errors import DataError
from sluice.types import ChatMessage

REWARD_MODEL = "reward_model"
GROUND_TRUTH = "ground_truth"
EXTRA_INFO = "extra_info"


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Names of the columns that the configuration lets one choose."""

    prompt: str = "prompt"
    data_source: str = "data_source"

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns without which a file cannot be used."""
        return (self.prompt, self.data_source, REWARD_MODEL)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What a row says."""

    messages: tuple[ChatMessage, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)


def check_columns(path: str, schema: pa.Schema, columns: PromptColumns) -> tuple[str, ...]:
    """The columns to read.

    Raises:
        DataError: a column is missing or of another type; names file, column and remedy.
    """
    for name in columns.needed:
        if name not in schema.names:
            raise DataError(
                f"{path}: no column '{name}' (found: {', '.join(schema.names)}); add it, or name "
                "yours with data.prompt_key or data.reward_fn_key"
            )
    turns = schema.field(columns.prompt).type
    if not _is_list(turns) or not _has_text(turns.value_type, "role", "content"):
        raise DataError(
            f"{path}: column '{columns.prompt}' is {turns}; it must be a list of "
            "{role, content} structs of strings"
        )
    if not _is_text(schema.field(columns.data_source).type):
        raise DataError(
            f"{path}: column '{columns.data_source}' is {schema.field(columns.data_source).type}; "
            "it must be a string"
        )
    if not _has_text(schema.field(REWARD_MODEL).type, GROUND_TRUTH):
        raise DataError(
            f"{path}: column '{REWARD_MODEL}' is {schema.field(REWARD_MODEL).type}; it must be a "
            f"struct with a string '{GROUND_TRUTH}'; convert other types to strings"
        )
    return (*columns.needed, *([EXTRA_INFO] if EXTRA_INFO in schema.names else []))


def decode_row(
    values: Mapping[str, object], columns: PromptColumns, *, path: str, row: int
) -> PromptRow:
    """Read a row's values (as Arrow converts them to Python).

    Raises:
        DataError: a value is missing; names file, row and remedy.
    """
    turns = values[columns.prompt]
    if not isinstance(turns, list) or not turns:
        raise _bad_row(path, row, f"'{columns.prompt}' holds no message")
    reward_model = values[REWARD_MODEL]
    ground_truth = reward_model[GROUND_TRUTH] if isinstance(reward_model, Mapping) else None
    if not isinstance(ground_truth, str):
        raise _bad_row(path, row, f"'{REWARD_MODEL}.{GROUND_TRUTH}' is {ground_truth!r}")
    data_source = values[columns.data_source]
    if not isinstance(data_source, str) or not data_source:
        raise _bad_row(path, row, f"'{columns.data_source}' is {data_source!r}")
    extra_info = values.get(EXTRA_INFO)
    return PromptRow(
        tuple(_message(turn, path, row, columns.prompt) for turn in turns),
        data_source,
        ground_truth,
        extra_info if isinstance(extra_info, dict) else {},
    )


def _message(turn: object, path: str, row: int, column: str) -> ChatMessage:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if not isinstance(role, str) or not role or not isinstance(content, str):
        raise _bad_row(path, row, f"'{column}' holds a message without role or content: {turn!r}")
    return ChatMessage(role, content)


def _bad_row(path: str, row: int, problem: str) -> DataError:
    return DataError(f"{path}, row {row}: {problem}; repair the row or remove it")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _has_text(kind: pa.DataType, *fields: str) -> bool:
    if not pa.types.is_struct(kind):
        return False
    found = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return all(name in found and _is_text(found[name]) for name in fields)
