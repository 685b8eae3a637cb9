"""Rows of published data sets, converted into verl's format.

Prompts and ground truths follow verl's preparation, so that scores compare. Where verl has no
wording, or a long one, ours requests the form that the scorer reads; `instruction` replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr

from sluice.data.image_sources import image_source
from sluice.data.prompt_rows import GROUND_TRUTH
from sluice.errors import DataError
from sluice.types import IMAGE_MARK

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
class Wishes:
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
    convert: Callable[[Row, str, int, Wishes], VerlRow]
    data_source: str
    split: str


def _verl_format(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    """Convert a row that is in verl's format: it keeps prompt, ground truth and data source."""
    reward_model = row.get("reward_model")
    truth = reward_model.get(GROUND_TRUTH) if isinstance(reward_model, Mapping) else None
    turns = row.get("prompt")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: 'prompt' is {_short(turns)}, not a list of messages")
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    extra = row.get("extra_info")
    made: VerlRow = {
        "data_source": _text(row, "data_source", place),
        "prompt": [
            {"role": _text(t, "role", place), "content": _text(t, "content", place)} for t in turns
        ],
        "ability": str(row.get("ability") or "math"),
        "reward_model": {"style": str(style or "rule"), GROUND_TRUTH: _truth(truth, place)},
        "extra_info": {
            "split": wishes.split,
            "index": index,
            **(extra if isinstance(extra, Mapping) else {}),
        },
    }
    images = row.get("images")
    return {**made, "images": _image_list(images, place)} if images is not None else made


def _gsm8k(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    question, answer = _text(row, "question", place), _text(row, "answer", place)
    _, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise DataError(f"{place}: 'answer' holds no number after ####: {_short(answer)}")
    asked = f"{question} {wishes.instruction or GSM8K_INSTRUCTION}"
    more = {"question": question, "answer": answer}
    truth = number.strip().replace(",", "").replace("$", "")
    return _row(asked, truth, "math", index, wishes, more)


def _boxed(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    problem = _text(row, "problem", place)
    answer = row.get("answer")
    truth = answer if isinstance(answer, str) else last_boxed(_text(row, "solution", place))
    if not truth:
        raise DataError(f"{place}: neither an 'answer' nor a \\boxed{{}} in 'solution'")
    asked = f"{problem} {wishes.instruction or BOXED_INSTRUCTION}"
    more = {key: str(row[key]) for key in ("unique_id", "subject", "level") if row.get(key)}
    return _row(asked, truth, "math", index, wishes, more)


def _answer_line(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    if "prompt" in row:
        return _verl_format(row, place, index, wishes)
    problem = _text(row, "problem", place)
    asked = f"{wishes.instruction or ANSWER_LINE_INSTRUCTION}\n\n{problem}"
    more = {"raw_problem": problem}
    return _row(asked, _truth(row.get("answer"), place), "MATH", index, wishes, more)


def _geometry(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    problem, images = _text(row, "problem", place), _image_list(row.get("images"), place)
    if IMAGE_MARK not in problem:
        problem = IMAGE_MARK * len(images) + problem
    asked = f"{problem} {wishes.instruction or THINK_INSTRUCTION}"
    truth = _truth(row.get("answer"), place)
    made = _row(asked, truth, "math", index, wishes, {})
    return {**made, "images": images}


def _choices(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    """Convert multiple choice: letters A to G of the last box, or of an answer of letters only."""
    instruction = _text(row, "instruction", place)
    answer = next((row[key] for key in ("answer", "output") if isinstance(row.get(key), str)), "")
    boxed = last_boxed(str(answer)) or str(answer).strip()
    letters = "".join(letter for letter in "ABCDEFG" if letter in boxed)
    if not letters or len(boxed) > 20:
        raise DataError(f"{place}: no letters A to G in the answer: {_short(answer)}")
    asked = f"{instruction}\n{wishes.instruction or CHOICE_INSTRUCTION}"
    return _row(asked, letters, "finance", index, wishes, {})


def _json_lines(row: Row, place: str, index: int, wishes: Wishes) -> VerlRow:
    """Convert a row in verl's format, or a question and an answer in fields that the user names."""
    if "reward_model" in row:
        return _verl_format(row, place, index, wishes)
    question = _text(row, wishes.prompt_field, place)
    asked = f"{question} {wishes.instruction}" if wishes.instruction else question
    truth = _truth(row.get(wishes.answer_field), f"{place}: '{wishes.answer_field}'")
    source = row.get("data_source")
    made = _row(asked, truth, "math", index, wishes, {})
    return {**made, "data_source": source} if isinstance(source, str) and source else made


PUBLISHED_SETS: Mapping[str, PublishedSet] = {
    "dapo-math-17k": PublishedSet((_VERL_COLUMNS,), _verl_format, "math_dapo", "train"),
    "aime-2024": PublishedSet(
        (_VERL_COLUMNS, ("problem", "answer")), _answer_line, "aime_2024", "test"
    ),
    "math-500": PublishedSet(
        (("problem", "answer"), ("problem", "solution")), _boxed, "HuggingFaceH4/MATH-500", "test"
    ),
    "gsm8k": PublishedSet((("question", "answer"),), _gsm8k, "openai/gsm8k", "train"),
    "geo3k": PublishedSet(
        (("images", "problem", "answer"),), _geometry, "hiyouga/geometry3k", "train"
    ),
    "dianjin": PublishedSet(
        (("instruction", "answer"), ("instruction", "output")), _choices, "dianjin", "train"
    ),
    "jsonl": PublishedSet(((),), _json_lines, "", "train"),
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


def _row(
    asked: str, truth: str, ability: str, index: int, wishes: Wishes, more: Mapping[str, object]
) -> VerlRow:
    return {
        "data_source": wishes.data_source,
        "prompt": [{"role": "user", "content": asked}],
        "ability": ability,
        "reward_model": {"style": "rule", GROUND_TRUTH: truth},
        "extra_info": {**more, "split": wishes.split, "index": index},
    }


def _text(row: object, column: str, place: str) -> str:
    found = row.get(column) if isinstance(row, Mapping) else None
    if not isinstance(found, str) or not found:
        raise DataError(f"{place}: '{column}' is {_short(found)}, not a text")
    return found


def _truth(found: object, place: str) -> str:
    """Return a truth as text: the answers of a published set are often integers."""
    if isinstance(found, bool) or not isinstance(found, str | int | float) or found == "":
        raise DataError(f"{place}: the answer is {_short(found)}, not a text or a number")
    return str(found)


def _image_list(found: object, place: str) -> list[dict[str, object]]:
    if not isinstance(found, list) or not found:
        raise DataError(f"{place}: 'images' is {_short(found)}, not a list of images")
    return [_image(one, place) for one in found]


def _image(found: object, place: str) -> dict[str, object]:
    try:
        source = image_source(found)
    except ValueError as error:
        raise DataError(f"{place}: 'images' holds an image that {error}") from error
    if isinstance(source, str):
        return {"bytes": None, "path": source}
    path = found.get("path") if isinstance(found, Mapping) else None
    return {"bytes": source, "path": path or None}


def _short(value: object) -> str:
    text = short_repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
