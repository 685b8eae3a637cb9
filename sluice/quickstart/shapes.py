"""Questions about coloured shapes in small pictures: what is shown, asked and answered.

Pure and seeded: the same seed gives the same scenes on every machine. A scene is a board of three
by three cells, one to four of which hold a shape.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sluice.quickstart.problems import ANSWER_REQUEST
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
