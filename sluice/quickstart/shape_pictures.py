"""Scenes as PNG files."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw

from sluice.quickstart.shapes import BOARD, Colour, Outline, PlacedShape, Scene

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
