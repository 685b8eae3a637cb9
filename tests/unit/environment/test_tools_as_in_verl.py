"""What the policy reads of verl's tools is what verl 0.9.1 shows it, with verl and without."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.reward.groups.settings import episode_rules
from sluice.config.loading.loader import load_config
from sluice.environment.source import EnvironmentSource
from sluice.environment.verl_stand_in import FUNCTION_TOOL_REGISTRY
from sluice.types import FinishReason
from tests.support.environments import author_file, calls, episode, served

STOP = FinishReason.STOP
HINTS: dict[str, dict[str, Any]] = {
    "Optional[int]": {"type": "integer"},
    "str | None": {"type": "string"},
    "int | float": {"type": ["integer", "number"]},
    "Literal['b', 'a']": {"type": "string", "enum": ["b", "a"]},
    "Optional[Literal[1, 2]]": {"type": "integer", "enum": [1, 2]},
    "Literal['b', 1]": {"type": ["string", "integer"], "enum": ["b", 1]},
    "list[str]": {"type": "array"},
    "dict[str, list[int]]": {"type": "object"},
    "tuple[int, str]": {"type": "array"},
    "Annotated[Optional[bool], 'x']": {"type": "boolean"},
}
"""By type hint, what `transformers.utils.get_json_schema` and verl's classes of schemas leave."""


@pytest.fixture(autouse=True)
def _no_tools() -> Iterator[None]:
    FUNCTION_TOOL_REGISTRY.clear()
    yield
    FUNCTION_TOOL_REGISTRY.clear()


def functions(folder: Path, text: str) -> EnvironmentSource:
    head = "from typing import *\nfrom verl.tools.function_tool import function_tool\n"
    return EnvironmentSource(function_tool_path=author_file(folder, head + text).path)


def parameters(source: EnvironmentSource) -> dict[str, Any]:
    (tool,) = source.load().tools
    found: dict[str, Any] = json.loads(tool.parameters)
    return found


@pytest.mark.parametrize("hint", HINTS)
def test_a_functions_schema_is_verls(tmp_path: Path, hint: str) -> None:
    source = functions(
        tmp_path,
        f"@function_tool\ndef f(a: {hint}):\n    '''Do.\n\n    Args:\n        a: An a.\n    '''\n",
    )
    found = parameters(source)
    assert found["properties"]["a"] == HINTS[hint] | {"description": "An a."}
    assert found["required"] == ["a"]


def test_choices_of_a_docstring_are_values_and_a_tool_without_arguments_requires_none(
    tmp_path: Path,
) -> None:
    text = (
        '@function_tool\ndef f(a: str = "tea"):\n    """Do.\n\n    Args:\n'
        '        a: A drink. (choices: ["tea", "milk"])\n    """\n'
    )
    assert parameters(functions(tmp_path, text)) == {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "A drink.", "enum": ["tea", "milk"]}},
    }


def test_choices_that_are_no_list_stay_in_the_text(tmp_path: Path) -> None:
    text = (
        '@function_tool\ndef f(a: str):\n    """Do.\n\n    Args:\n'
        '        a: A drink. (choices: tea, milk)\n    """\n'
    )
    found = parameters(functions(tmp_path, text))["properties"]["a"]
    assert found == {"type": "string", "description": "A drink. (choices: tea, milk)"}


def test_of_a_given_schema_verls_keys_are_shown_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "verl_given.py").write_text("from verl.tools.base_tool import BaseTool as Given\n")
    config = tmp_path / "tools.yaml"
    config.write_text("""
tools:
  - class_name: verl_given.Given
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: given
        description: Do.
        parameters:
          required: [a]
          properties: {a: {items: {type: string}, description: Words., type: array, default: []}}
          type: object
""")
    importlib.invalidate_caches()
    found = parameters(EnvironmentSource(tool_config_path=str(config)))
    assert json.dumps(found) == (
        '{"type": "object", "properties": {"a": {"type": "array", "description": "Words."}}, '
        '"required": ["a"]}'
    )


ADD = '''
@function_tool
def add(a: float, b: float):
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b
'''


async def test_a_function_gets_the_arguments_that_the_policy_wrote_and_fails_in_verls_words(
    tmp_path: Path,
) -> None:
    async with served(functions(tmp_path, ADD), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        made = calls(("add", {"a": 1, "b": 2}), ("add", {"a": 1}), ("sub", {}))
        seen = await played.step(0, made, STOP)
    assert [(one.content, one.is_error) for one in seen.messages] == [
        ("3", False),
        ("Error executing tool 'add': add() missing 1 required positional argument: 'b'", True),
        ("Unknown function 'sub'. Available tools: ['add']", True),
    ]


def test_with_verls_tools_an_episode_has_the_tokens_of_one_response_beyond_its_prompt() -> None:
    sizes = ("data.max_prompt_length=100", "data.max_response_length=50")
    tools = "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py"
    assert episode_rules(load_config(None, [*sizes, tools])).max_response_tokens == 50
    own = load_config(None, [*sizes, "sluice.environment.path=own.py"])
    assert episode_rules(own).max_response_tokens is None
