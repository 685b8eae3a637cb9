"""The task with pictures: questions about coloured shapes, in parquet files like Geometry3k's."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.quickstart.arithmetic import ANSWER_REQUEST, row_schema, verl_row, write_rows
from sluice.quickstart.settings import QuickstartTask
from sluice.types import IMAGE_MARK

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw as Draw


BOARD = 3
MOST_SHAPES = 4
# The slip of the largest count is one more than there can be.
_COUNTS = tuple(str(count) for count in range(MOST_SHAPES + 2))
CELL_PIXELS = 16
SIDE_PIXELS = BOARD * CELL_PIXELS
_HALF = 5
_IMAGES = pa.list_(pa.struct([("bytes", pa.binary())]))


class Colour(StrEnum):
    """The colour of all shapes in a picture."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"
    YELLOW = "yellow"


class Outline(StrEnum):
    """The form of a shape."""

    CIRCLE = "circle"
    SQUARE = "square"
    TRIANGLE = "triangle"


SHAPES = QuickstartTask(
    name="shapes", max_prompt_tokens=56, max_response_tokens=16, overlong_buffer_tokens=4
)


@dataclass(frozen=True, slots=True)
class PlacedShape:
    """A shape in cell `row`, `column`, shifted from its centre by `dx`, `dy` in -1, 0, 1."""

    row: int
    column: int
    dx: int
    dy: int
    outline: Outline


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a picture: shapes of one colour."""

    colour: Colour
    shapes: tuple[PlacedShape, ...]


@dataclass(frozen=True, slots=True)
class ShapeQuestion:
    """A question about a scene. `slip` is the wrong answer next to the right one."""

    scene: Scene
    text: str
    answer: str
    slip: str

    @property
    def question(self) -> str:
        """The user's message; the picture comes first."""
        return f"{IMAGE_MARK}{self.text}{ANSWER_REQUEST}"


def draw_scene(rng: random.Random) -> Scene:
    """Sample one to four shapes in different cells, all uniformly."""
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
    """Return a question about the number of shapes or their colour."""
    if rng.random() < 0.5:
        colours = [str(colour) for colour in Colour]
        return _question(scene, "Which colour?", str(scene.colour), colours)
    return _question(scene, "How many shapes?", str(len(scene.shapes)), _COUNTS)


def questions(seed: str) -> Iterator[ShapeQuestion]:
    """Yield questions without end, each about a new scene."""
    rng = random.Random(seed)
    while True:
        yield draw_question(rng, draw_scene(rng))


def answer_text(answer: str) -> str:
    """Return the assistant's message."""
    return f"Answer: {answer}"


def _question(
    scene: Scene, text: str, answer: str, answers: list[str] | tuple[str, ...]
) -> ShapeQuestion:
    slip = answers[(answers.index(answer) + 1) % len(answers)]
    return ShapeQuestion(scene, text, answer, slip)


_PAINT = {
    Colour.RED: (220, 40, 40),
    Colour.GREEN: (30, 160, 60),
    Colour.BLUE: (40, 70, 220),
    Colour.YELLOW: (240, 200, 30),
}


def picture(scene: Scene) -> bytes:
    """Return the scene on white as a PNG of 48 by 48 pixels."""
    from PIL import Image, ImageDraw  # of the extra torch, which this module does without

    image = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), "white")
    draw = ImageDraw.Draw(image)
    for shape in scene.shapes:
        _draw(draw, shape, _PAINT[scene.colour])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _draw(draw: Draw, shape: PlacedShape, paint: tuple[int, int, int]) -> None:
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


def write_shapes(path: Path, asked: Iterable[ShapeQuestion], split: str) -> None:
    """Write the questions in order, each with its picture."""
    rows = [
        verl_row(one.question, one.answer, index, split)
        | {"images": [{"bytes": picture(one.scene)}], "ability": "shapes"}
        for index, one in enumerate(asked)
    ]
    write_rows(path, rows, row_schema(_IMAGES))
