"""The task with pictures: coloured shapes, questions about them, and their parquet files in
Geometry3k's row format.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from sluice.quickstart.arithmetic import ANSWER_REQUEST, DATA_SOURCE, ROW_GROUP_ROWS
from sluice.types import IMAGE_MARK

BOARD = 3
MOST_SHAPES = 4
_COUNTS = tuple(str(count) for count in range(MOST_SHAPES + 2))
"""One more than there can be: what follows the largest count."""


class Colour(StrEnum):
    """Of a shape."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"
    YELLOW = "yellow"


class Outline(StrEnum):
    """Of a shape."""

    CIRCLE = "circle"
    SQUARE = "square"
    TRIANGLE = "triangle"


@dataclass(frozen=True, slots=True)
class ShapesTask:
    """The task's name and the token limits that its job is run with."""

    name: str = "shapes"
    max_prompt_tokens: int = 56
    max_response_tokens: int = 16
    overlong_buffer_tokens: int = 4


SHAPES = ShapesTask()


@dataclass(frozen=True, slots=True)
class PlacedShape:
    """A shape in cell `row`, `column`; `dx`, `dy` in -1, 0, 1 say how it is off its middle."""

    row: int
    column: int
    dx: int
    dy: int
    outline: Outline


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows: shapes of one colour."""

    colour: Colour
    shapes: tuple[PlacedShape, ...]


@dataclass(frozen=True, slots=True)
class ShapeQuestion:
    """A question about a scene. `slip` is the answer of somebody who is one off."""

    scene: Scene
    text: str
    answer: str
    slip: str

    @property
    def question(self) -> str:
        """The user's message; the picture comes first."""
        return f"{IMAGE_MARK}{self.text}{ANSWER_REQUEST}"


def draw_scene(rng: random.Random) -> Scene:
    """One to four shapes in different cells, everything uniform."""
    cells = rng.sample(range(BOARD * BOARD), rng.randint(1, MOST_SHAPES))
    return Scene(
        rng.choice(list(Colour)),
        tuple(
            PlacedShape(
                cell // BOARD,
                cell % BOARD,
                rng.randint(-1, 1),
                rng.randint(-1, 1),
                rng.choice(list(Outline)),
            )
            for cell in cells
        ),
    )


def draw_question(rng: random.Random, scene: Scene) -> ShapeQuestion:
    """How many shapes there are, or their colour."""
    if rng.random() < 0.5:
        colours = [str(colour) for colour in Colour]
        return _question(scene, "Which colour?", str(scene.colour), colours)
    return _question(scene, "How many shapes?", str(len(scene.shapes)), _COUNTS)


def questions(seed: str) -> Iterator[ShapeQuestion]:
    """Without end, each about a scene of its own."""
    rng = random.Random(seed)
    while True:
        yield draw_question(rng, draw_scene(rng))


def answer_text(answer: str) -> str:
    """The assistant's message."""
    return f"Answer: {answer}"


def _question(
    scene: Scene, text: str, answer: str, answers: list[str] | tuple[str, ...]
) -> ShapeQuestion:
    slip = answers[(answers.index(answer) + 1) % len(answers)]
    return ShapeQuestion(scene, text, answer, slip)


CELL_PIXELS = 16
SIDE_PIXELS = BOARD * CELL_PIXELS
_HALF = 5
_PAINT = {
    Colour.RED: (220, 40, 40),
    Colour.GREEN: (30, 160, 60),
    Colour.BLUE: (40, 70, 220),
    Colour.YELLOW: (240, 200, 30),
}


def picture(scene: Scene) -> bytes:
    """The scene on white, as an encoded PNG of 48 by 48 pixels."""
    image = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), "white")
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        _draw(draw, shape, _PAINT[scene.colour])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _draw(draw: ImageDraw.ImageDraw, shape: PlacedShape, paint: tuple[int, int, int]) -> None:
    x = shape.column * CELL_PIXELS + CELL_PIXELS // 2 + shape.dx
    y = shape.row * CELL_PIXELS + CELL_PIXELS // 2 + shape.dy
    box = (x - _HALF, y - _HALF, x + _HALF, y + _HALF)
    match shape.outline:
        case Outline.CIRCLE:
            draw.ellipse(box, fill=paint)
        case Outline.SQUARE:
            draw.rectangle(box, fill=paint)
        case Outline.TRIANGLE:
            draw.polygon([(x, y - _HALF), (x - _HALF, y + _HALF), (x + _HALF, y + _HALF)], paint)


# Questions about pictures as parquet files in the row format of Geometry3k for verl.
#
# The columns of `sluice.quickstart.arithmetic`, and `images`: a list of structs with an encoded
# file in `bytes`. The user's message holds ``<image>`` where the picture belongs.

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("images", pa.list_(pa.struct([("bytes", pa.binary())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)


def to_row(question: ShapeQuestion, index: int, split: str) -> dict[str, object]:
    """One row: the picture and the question as a single user message."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question.question}],
        "images": [{"bytes": picture(question.scene)}],
        "ability": "shapes",
        "reward_model": {"ground_truth": question.answer, "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }


def write_shapes(path: Path, asked: Iterable[ShapeQuestion], split: str) -> None:
    """Write the questions in order, in row groups small enough to stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [to_row(question, index, split) for index, question in enumerate(asked)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS)
