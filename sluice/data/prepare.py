"""Convert published data sets into Parquet files of verl's format, a few rows at a time.

Prompts and ground truths follow verl's preparation, so that scores compare. Where verl has no
wording, or a long one, ours requests the form that the scorer reads; `instruction` replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from reprlib import repr as short_repr

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.algorithm.episode_rules import AGENT_NAME
from sluice.data.image_sources import image_source, usable_images
from sluice.data.prompt_rows import GROUND_TRUTH, UNREAD_KEYS, UNREAD_MEDIA, media_error
from sluice.data.row_files import check_raw_file, digest_of, raw_rows
from sluice.errors import DataError
from sluice.types import IMAGE_MARK

ROWS_PER_GROUP = 1024
"""Small row groups: the shuffle visits them in random order, and a reader holds one."""

MAX_PROBLEMS_KEPT = 5
_TEXT = pa.string()
_FIELDS: Mapping[str, pa.DataType] = {
    "data_source": _TEXT,
    "prompt": pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)])),
    "ability": _TEXT,
    "reward_model": pa.struct([("style", _TEXT), ("ground_truth", _TEXT)]),
    "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", _TEXT)])),
    AGENT_NAME: _TEXT,
}
_OPTIONAL_FIELDS = ("images", AGENT_NAME)
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
BOXED_INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
THINK_INSTRUCTION = (
    "Reason first, inside <think> </think> tags; then give the final answer in \\boxed{}."
)
ANSWER_LINE_INSTRUCTION = (
    'Solve the problem step by step. End with a line of its own of the form "Answer: $Answer".'
)
CHOICE_INSTRUCTION = r"Give the letters of all right choices in \boxed{}."

Row = Mapping[str, object]
VerlRow = dict[str, object]

_VERL_COLUMNS = ("prompt", "data_source", "reward_model")


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """The settings of a user.

    `instruction` replaces the data set's own; the fields name the columns of plain JSON lines.
    """

    split: str
    data_source: str
    instruction: str | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """A data set as published.

    Attributes:
        columns: sets of columns; its rows have all columns of one set.
        convert: takes a row, its place for messages, its index and the settings; returns a row in
            verl's format.
        data_source: selects the scorer.
        split: the split that the published file usually is.
    """

    columns: tuple[tuple[str, ...], ...]
    convert: Callable[[Row, str, int, PrepareOptions], VerlRow]
    data_source: str
    split: str


def _convert_verl_row(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    """Convert a row that is in verl's format: it keeps prompt, ground truth and data source."""
    reward_model = row.get("reward_model")
    truth = reward_model.get(GROUND_TRUTH) if isinstance(reward_model, Mapping) else None
    turns = row.get("prompt")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: 'prompt' is {short_repr(turns)}, not a list of messages")
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    extra = row.get("extra_info")
    verl_row: VerlRow = {
        "data_source": _text_field(row, "data_source", place),
        "prompt": [_convert_turn(turn, place) for turn in turns],
        "ability": str(row.get("ability") or "math"),
        "reward_model": {"style": str(style or "rule"), GROUND_TRUTH: _truth_text(truth, place)},
        "extra_info": {
            "split": options.split,
            "index": index,
            **(extra if isinstance(extra, Mapping) else {}),
        },
    }
    images = row.get("images")
    return {**verl_row, "images": _image_list(images, place)} if images is not None else verl_row


def _convert_turn(turn: object, place: str) -> dict[str, str]:
    texts = {key: _text_field(turn, key, place) for key in ("role", "content")}
    assert isinstance(turn, Mapping)
    if unread_keys := [key for key in UNREAD_KEYS if turn.get(key)]:
        raise DataError(
            f"{place}: 'prompt' holds a message with {unread_keys[0]}, which no run reads"
        )
    return texts


def _convert_gsm8k(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    question, answer = _text_field(row, "question", place), _text_field(row, "answer", place)
    _, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise DataError(f"{place}: 'answer' holds no number after ####: {short_repr(answer)}")
    prompt = f"{question} {options.instruction or GSM8K_INSTRUCTION}"
    extra = {"question": question, "answer": answer}
    truth = number.strip().replace(",", "").replace("$", "")
    return _make_row(prompt, truth, "math", index, options, extra)


def _convert_boxed(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    problem = _text_field(row, "problem", place)
    answer = row.get("answer")
    truth = answer if isinstance(answer, str) else last_boxed(_text_field(row, "solution", place))
    if not truth:
        raise DataError(f"{place}: neither an 'answer' nor a \\boxed{{}} in 'solution'")
    prompt = f"{problem} {options.instruction or BOXED_INSTRUCTION}"
    extra = {key: str(row[key]) for key in ("unique_id", "subject", "level") if row.get(key)}
    return _make_row(prompt, truth, "math", index, options, extra)


def _convert_answer_line(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    if "prompt" in row:
        return _convert_verl_row(row, place, index, options)
    problem = _text_field(row, "problem", place)
    prompt = f"{options.instruction or ANSWER_LINE_INSTRUCTION}\n\n{problem}"
    extra = {"raw_problem": problem}
    return _make_row(prompt, _truth_text(row.get("answer"), place), "MATH", index, options, extra)


def _convert_geometry(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    problem, images = _text_field(row, "problem", place), _image_list(row.get("images"), place)
    if IMAGE_MARK not in problem:
        problem = IMAGE_MARK * len(images) + problem
    prompt = f"{problem} {options.instruction or THINK_INSTRUCTION}"
    truth = _truth_text(row.get("answer"), place)
    verl_row = _make_row(prompt, truth, "math", index, options, {})
    return {**verl_row, "images": images}


def _convert_choices(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    """Convert multiple choice: letters A to G of the last box, or of an answer of letters only."""
    instruction = _text_field(row, "instruction", place)
    answer = next((row[key] for key in ("answer", "output") if isinstance(row.get(key), str)), "")
    boxed = last_boxed(str(answer)) or str(answer).strip()
    letters = "".join(letter for letter in "ABCDEFG" if letter in boxed)
    if not letters or len(boxed) > 20:
        raise DataError(f"{place}: no letters A to G in the answer: {short_repr(answer)}")
    prompt = f"{instruction}\n{options.instruction or CHOICE_INSTRUCTION}"
    return _make_row(prompt, letters, "finance", index, options, {})


def _convert_json_line(row: Row, place: str, index: int, options: PrepareOptions) -> VerlRow:
    """Convert a row in verl's format, or a question and an answer in fields that the user names."""
    if "reward_model" in row:
        return _convert_verl_row(row, place, index, options)
    for column, option in ((options.prompt_field, "prompt"), (options.answer_field, "answer")):
        if column not in row:
            names = ", ".join(row)
            raise DataError(
                f"{place}: no field '{column}' (found: {names}); name yours with --{option}-field"
            )
    question = _text_field(row, options.prompt_field, place)
    prompt = f"{question} {options.instruction}" if options.instruction else question
    truth = _truth_text(row.get(options.answer_field), f"{place}: '{options.answer_field}'")
    source = row.get("data_source")
    verl_row = _make_row(prompt, truth, "math", index, options, {})
    return {**verl_row, "data_source": source} if isinstance(source, str) and source else verl_row


PUBLISHED_SETS: Mapping[str, PublishedSet] = {
    "dapo-math-17k": PublishedSet((_VERL_COLUMNS,), _convert_verl_row, "math_dapo", "train"),
    "aime-2024": PublishedSet(
        (_VERL_COLUMNS, ("problem", "answer")), _convert_answer_line, "aime_2024", "test"
    ),
    "math-500": PublishedSet(
        (("problem", "answer"), ("problem", "solution")),
        _convert_boxed,
        "HuggingFaceH4/MATH-500",
        "test",
    ),
    "gsm8k": PublishedSet((("question", "answer"),), _convert_gsm8k, "openai/gsm8k", "train"),
    "geo3k": PublishedSet(
        (("images", "problem", "answer"),), _convert_geometry, "hiyouga/geometry3k", "train"
    ),
    "dianjin": PublishedSet(
        (("instruction", "answer"), ("instruction", "output")), _convert_choices, "dianjin", "train"
    ),
    "jsonl": PublishedSet(((),), _convert_json_line, "", "train"),
}
"""The sets by the name that ``sluice data prepare`` takes."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, braces matched; ``None`` without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None


def _make_row(
    prompt: str,
    truth: str,
    ability: str,
    index: int,
    options: PrepareOptions,
    extra: Mapping[str, object],
) -> VerlRow:
    return {
        "data_source": options.data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", GROUND_TRUTH: truth},
        "extra_info": {**extra, "split": options.split, "index": index},
    }


def _text_field(row: object, column: str, place: str) -> str:
    value = row.get(column) if isinstance(row, Mapping) else None
    if not isinstance(value, str) or not value:
        raise DataError(f"{place}: '{column}' is {short_repr(value)}, not a text")
    return value


def _truth_text(answer: object, place: str) -> str:
    """Return a truth as text: the answers of a published set are often integers."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        raise DataError(f"{place}: the answer is {short_repr(answer)}, not a text or a number")
    return str(answer)


def _image_list(images: object, place: str) -> list[dict[str, object]]:
    if not isinstance(images, list) or not images:
        raise DataError(f"{place}: 'images' is {short_repr(images)}, not a list of images")
    return [_image(image, place) for image in images]


def _image(image: object, place: str) -> dict[str, object]:
    try:
        source = image_source(image)
    except ValueError as error:
        raise DataError(f"{place}: 'images' holds an image that {error}") from error
    if isinstance(source, str):
        return {"bytes": None, "path": source}
    path = image.get("path") if isinstance(image, Mapping) else None
    return {"bytes": source, "path": path or None}


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """The conversion to do.

    Attributes:
        name: a key of `PUBLISHED_SETS`.
        inputs: files as downloaded, read in order.
        output: the file to write; one that exists is replaced.
        options: split, data source, wording.
        limit: rows to write at most; ``None``: all.
        deduplicate: leave out rows that repeat the messages and ground truth of an earlier one.
        skip_bad: leave out rows that cannot be used, instead of ending.
    """

    name: str
    inputs: tuple[Path, ...]
    output: Path
    options: PrepareOptions
    limit: int | None = None
    deduplicate: bool = False
    skip_bad: bool = False


@dataclass(slots=True)
class PrepareResult:
    """The result of a conversion, in rows."""

    num_read: int = 0
    num_written: int = 0
    num_duplicates: int = 0
    num_bad: int = 0
    problems: list[str] = field(default_factory=list)  # the first few of the bad ones


def prepare(job: PrepareJob, on_rows: Callable[[int], None] | None = None) -> PrepareResult:
    """Convert files. The output appears only when it is complete.

    Args:
        job: the conversion.
        on_rows: called with the number of rows read so far.

    Raises:
        DataError: a file or a row cannot be used; names file, row and column. Nothing is written.
    """
    published = PUBLISHED_SETS[job.name]
    for path in job.inputs:
        _check_names(job.name, published, path, check_raw_file(path))
    result = PrepareResult()
    rows = islice(_convert_rows(job, published, result, on_rows), job.limit)
    part = job.output.with_name(f"{job.output.name}.part")
    job.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_rows(part, rows, result)
        if not result.num_written:
            why = result.problems[0] if result.problems else "the files are empty"
            raise DataError(f"{', '.join(map(str, job.inputs))}: no usable row; {why}")
        os.replace(part, job.output)
    finally:
        part.unlink(missing_ok=True)
    return result


def _check_names(name: str, published: PublishedSet, path: Path, columns: Sequence[str]) -> None:
    if not any(set(needed) <= set(columns) for needed in published.columns):
        needed = " or ".join(", ".join(names) for names in published.columns)
        raise DataError(
            f"{path}: columns {', '.join(columns)} are not those of {name} ({needed}); give the "
            "file as it was published, or prepare it as 'jsonl' with --prompt-field and "
            "--answer-field"
        )


def _convert_rows(
    job: PrepareJob,
    published: PublishedSet,
    result: PrepareResult,
    on_rows: Callable[[int], None] | None,
) -> Iterator[tuple[str, VerlRow]]:
    """Yield places and rows to write."""
    digests: set[int] = set()
    index = 0
    for path, row in ((file, row) for file in job.inputs for row in raw_rows(file)):
        result.num_read += 1
        if on_rows is not None:
            on_rows(result.num_read)
        try:
            values = row.values()
            converted = published.convert(values, row.place, index, job.options)
            for name in UNREAD_MEDIA:
                if values.get(name):
                    raise media_error(row.place, name)
            if AGENT_NAME in values:
                agent_name = values[AGENT_NAME]
                converted[AGENT_NAME] = (
                    _text_field(values, AGENT_NAME, row.place) if agent_name else None
                )
            _move_paths(converted.get("images"), path.parent, job.output.parent)
        except DataError as error:
            if not job.skip_bad:
                raise DataError(f"{error}; repair the row or use --skip-bad") from error
            result.num_bad += 1
            result.problems += [str(error)] if len(result.problems) < MAX_PROBLEMS_KEPT else []
            continue
        if job.deduplicate:
            digest = _digest(converted)
            if digest in digests:
                result.num_duplicates += 1
                continue
            digests.add(digest)
        index += 1
        yield row.place, converted


def _move_paths(images: object, old_folder: Path, new_folder: Path) -> None:
    """Let paths of images that start at `old_folder` start at `new_folder`."""
    for image in images if isinstance(images, list) else ():
        if image["bytes"] is None and not os.path.isabs(image["path"]):
            image["path"] = os.path.relpath(
                old_folder.resolve() / image["path"], new_folder.resolve()
            )


def _digest(row: Row) -> int:
    turns, reward_model = row["prompt"], row["reward_model"]
    assert isinstance(turns, list)
    assert isinstance(reward_model, dict)
    roles, contents = ([turn[key] for turn in turns] for key in ("role", "content"))
    return digest_of(roles, contents, reward_model[GROUND_TRUTH], usable_images(row.get("images")))


def _write_rows(path: Path, rows: Iterator[tuple[str, VerlRow]], result: PrepareResult) -> None:
    """Write row groups one by one. The first decides which columns and further fields there are."""
    writer: pq.ParquetWriter | None = None
    try:
        while chunk := list(islice(rows, ROWS_PER_GROUP)):
            schema = _schema(chunk) if writer is None else writer.schema
            for place, row in chunk:
                _check_fields(place, row, schema)
            table = _table(chunk, schema)
            writer = writer or pq.ParquetWriter(path, schema, compression="zstd")
            writer.write_table(table)
            result.num_written += len(chunk)
    finally:
        if writer is not None:
            writer.close()


def _schema(chunk: list[tuple[str, VerlRow]]) -> pa.Schema:
    missing = {name for name in _OPTIONAL_FIELDS if not any(name in row for _, row in chunk)}
    fields = [(name, kind) for name, kind in _FIELDS.items() if name not in missing]
    extra = _infer_type([row["extra_info"] for _, row in chunk], chunk[0][0])
    return pa.schema([*fields, ("extra_info", extra)])


def _infer_type(extra: list[object], place: str) -> pa.DataType:
    try:
        kind = pa.array(extra).type
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{place} and those after it: fields of extra_info change their type ({error}); give "
            "each field one type, and numbers within 64 bits"
        ) from error
    parts = [kind.field(i) for i in range(kind.num_fields)]
    return pa.struct([(p.name, _TEXT if pa.types.is_null(p.type) else p.type) for p in parts])


def _check_fields(place: str, row: Row, schema: pa.Schema) -> None:
    """Refuse fields that the schema does not know, which Arrow would omit silently."""
    extra, kind = row["extra_info"], schema.field("extra_info").type
    field_names = {kind.field(i).name for i in range(kind.num_fields)}
    assert isinstance(extra, dict)
    unknown = [*(row.keys() - set(schema.names)), *(extra.keys() - field_names)]
    if unknown:
        raise DataError(
            f"{place}: field {', '.join(sorted(unknown))} is in none of the first "
            f"{ROWS_PER_GROUP} rows, which decide the columns; move this row to the top of the "
            "first file, or give every row the same fields"
        )


def _table(chunk: list[tuple[str, VerlRow]], schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_pylist([row for _, row in chunk], schema=schema)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise DataError(
            f"{chunk[0][0]} and the {len(chunk) - 1} rows after it: extra_info changes its types "
            f"({error}); give each field one type, and numbers within 64 bits"
        ) from error
