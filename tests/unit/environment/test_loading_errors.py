"""What keeps a file from being an environment names file, method and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.environment.loading import file_environment
from sluice.environment.source import EnvironmentSource
from sluice.errors import ConfigError

TOOL = "class World:\n    def look(self, jar{hint}):\n        {docstring}\n        return jar\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TOOL.format(hint="", docstring="'''Look.'''"), "world.py: World.look: the argument 'jar'"),
        (TOOL.format(hint=": str", docstring=""), "world.py: World.look has no docstring"),
        (TOOL.format(hint=": complex", docstring="'''Look.'''"), "has no JSON schema"),
        (TOOL.format(hint=": unknown", docstring="'''Look.'''"), "unknown"),
        ("class World:\n    def look(self, *jars: str):\n        '''Look.'''\n", "name every"),
        ("class World:\n    def reset(self, level): ...\n", "World.reset: missing"),
        (
            "class World:\n    def __init__(self, size): ...\n    def turn(self, text): ...\n",
            "size",
        ),
        ("class World:\n    def reset(self, prompt): ...\n", "neither a tool nor turn"),
        (
            "class World:\n    def turn(self, text): ...\n    def done(self): ...\n",
            "World.done is a method",
        ),
        ("class A:\n    def turn(self, t): ...\nclass B(A): ...\n", "defines A, B"),
        ("x = 1\n", "defines no environment"),
        ("import nothing_of_this_name\n", "fails to import"),
        ("from verl.tools.nothing import a\n", "function_tool_path instead"),
        ("async def run(task): ...\n", "called with a task and a policy"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "world.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        file_environment(str(path))
    assert said in str(refused.value)


def test_a_name_chooses_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "world.py"
    path.write_text("class A:\n    def turn(self, t): ...\nclass B(A): ...\n")
    assert file_environment(str(path), "B").name == "B"
    with pytest.raises(ConfigError, match="it has: A, B"):
        file_environment(str(path), "C")


def test_a_field_named_title_is_in_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "world.py"
    path.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Book:\n    title: str\n"
        "class World:\n    def add(self, book: Book) -> str:\n        'Add.'\n"
    )
    (tool,) = file_environment(str(path)).tools
    book = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    assert json.loads(tool.parameters)["properties"] == {"book": book}


def test_hints_and_docstring_make_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "world.py"
    path.write_text(
        '''
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Optional

class Colour(Enum):
    RED = "red"
    BLUE = "blue"

@dataclass
class Place:
    shelf: int
    side: str = "left"

class World:
    def put(self, place: Place, colour: Colour, size: Literal["s", "l"], names: list[str],
            weight: Optional[float] = None) -> str:
        """Put a jar
        on a shelf.

        Args:
            place: where,
                exactly.
            size (str): how large.

        Returns:
            nothing: of use.
        """
        return f"{place.shelf} {colour.name}"
'''
    )
    (tool,) = file_environment(str(path)).tools
    schema = json.loads(tool.parameters)
    assert tool.description == "Put a jar\non a shelf."
    assert schema["required"] == ["place", "colour", "size", "names"]
    found = schema["properties"]
    assert found["place"]["properties"]["shelf"] == {"type": "integer"}
    assert found["place"]["description"] == "where, exactly."
    assert sorted(found["colour"]["enum"]) == ["blue", "red"]
    assert found["size"] == {"enum": ["l", "s"], "description": "how large."}
    assert found["names"] == {"type": "array", "items": {"type": "string"}}
    assert {"type": "number"} in found["weight"]["anyOf"]


def test_a_class_of_verls_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text("tools:\n  - class_name: verl.tools.gone.Tool\n    config: {type: native}\n")
    with pytest.raises(ConfigError, match=r"verl\.tools\.gone\.Tool cannot be loaded"):
        EnvironmentSource(tool_config_path=str(path)).load()
