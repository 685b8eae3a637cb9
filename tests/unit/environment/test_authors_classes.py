"""Classes, functions and verl's tools play episodes over the real server."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.reward.episodes.drivers import EpisodeFailedError
from sluice.cli.main import commands
from sluice.environment.source import EnvironmentSource
from sluice.environment.verl_stand_in import FUNCTION_TOOL_REGISTRY
from sluice.errors import ConfigError
from sluice.types import Answer, FinishReason, Scored
from tests.support.environments import (
    CALCULATOR,
    author_file,
    calls,
    episode,
    row,
    served,
)
from tests.support.scripted_environment import eventually
from tests.support.verl_tools import verl_tools

STOP = FinishReason.STOP


async def test_the_calculator_plays_an_episode_and_scores_it(tmp_path: Path) -> None:
    async with served(author_file(tmp_path, CALCULATOR), tmp_path) as servers:
        played = episode(servers)
        opened = await played.open()
        assert [tool.name for tool in opened.tools] == ["calc"]
        assert json.loads(opened.tools[0].parameters)["required"] == ["expression"]
        seen = await played.step(0, calls(("calc", {"expression": "47 * 38"})), STOP)
        assert [(one.role, one.content, one.tool_call_id) for one in seen.messages] == [
            ("tool", "1786", "call_0")
        ]
        assert not seen.done
        assert (await played.step(1, Answer(" 1786 "), STOP)).done
        assert await played.close() == Scored(1.0, 1.0, {"acc": 1.0})


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("calc", "{no json", "(char 1); write an object"),
        ("calc", "[1]", "write a JSON object"),
        ("calc", {}, "needs the argument 'expression'"),
        ("calc", {"expression": "1", "base": 2}, "no argument 'base'"),
        ("calc", {"expression": [1]}, "argument 'expression' of calc: Expected `str`"),
        ("calc", {"expression": "1 / 0"}, "ZeroDivisionError"),
        ("add", {}, "no tool 'add'; the tools are: calc"),
    ],
)
async def test_the_policy_reads_what_it_did_wrong_as_a_marked_message(
    tmp_path: Path, name: str, arguments: object, said: str
) -> None:
    async with served(author_file(tmp_path, CALCULATOR), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        seen = await played.step(0, calls((name, arguments)), STOP)
        assert seen.messages[0].role == "tool"
        assert said in seen.messages[0].content
        assert seen.messages[0].is_error
        assert not seen.done
        unread = await played.step(1, Answer("<call", tool_error="no name"), STOP)
        assert "no name" in unread.messages[0].content
        assert unread.messages[0].is_error


async def test_a_repeated_turn_has_the_same_answer_and_is_made_once(tmp_path: Path) -> None:
    source = author_file(
        tmp_path,
        """
class Counter:
    number = 0
    async def count(self) -> int:
        '''Count.'''
        self.number += 1
        return self.number
""",
    )
    async with served(source, tmp_path) as servers:
        played = episode(servers)
        await played.open()
        first = await played.step(0, calls(("count", {})), STOP)
        assert await played.step(0, calls(("count", {})), STOP) == first
        assert (await played.step(1, calls(("count", {})), STOP)).messages[0].content == "2"
        with pytest.raises(EpisodeFailedError, match="the next one"):
            await played.step(5, calls(("count", {})), STOP)


async def test_a_game_in_text_gives_rewards_and_ends_with_none(tmp_path: Path) -> None:
    source = author_file(
        tmp_path,
        """
class Guess:
    def reset(self, seed):
        self.number = seed
        return "Guess."
    def turn(self, text):
        if int(text) == self.number:
            return None, 1.0
        return "Wrong.", -0.5
""",
    )
    async with served(source, tmp_path) as servers:
        played = episode(servers, seed=7)
        assert (await played.open()).messages[0].content == "Guess."
        seen = await played.step(0, Answer("3"), STOP)
        assert (seen.messages[0].role, seen.messages[0].content) == ("user", "Wrong.")
        assert (seen.done, seen.reward) == (False, -0.5)
        last = await played.step(1, Answer("7"), STOP)
        assert (last.done, last.reward) == (True, 1.0)
        assert await played.close() is None


async def test_rewards_of_tools_add_up_and_done_ends_the_episode(tmp_path: Path) -> None:
    source = author_file(
        tmp_path,
        """
class Jar:
    done = False
    def take(self, count: int = 1) -> tuple:
        '''Take.'''
        self.done = count > 1
        return {"taken": count}, 0.5 * count
""",
    )
    async with served(source, tmp_path) as servers:
        played = episode(servers)
        await played.open()
        seen = await played.step(0, calls(("take", {}), ("take", {"count": 0})), STOP)
        assert [one.content for one in seen.messages] == ['{"taken": 1}', '{"taken": 0}']
        assert (seen.reward, seen.done) == (0.5, False)
        seen = await played.step(1, calls(("take", {}), ("take", {"count": 2})), STOP)
        assert (seen.reward, seen.done) == (1.5, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no data')", "ValueError: no data (world.py:"),
        ("raise sluice.EnvironmentUnavailable('the index is down')", "the index is down"),
        ("return 'x', float('nan')", "the reward nan"),
        ("return 'x', 10**400", "the reward inf"),
    ],
)
async def test_failures_of_turn_are_the_environments(tmp_path: Path, body: str, said: str) -> None:
    text = f"import sluice\nclass Bad:\n    def turn(self, text):\n        {body}\n"
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        with pytest.raises(EpisodeFailedError) as failed:
            await played.step(0, Answer("x"), STOP)
        assert said in str(failed.value)


@pytest.mark.parametrize(
    ("score", "metrics"),
    [
        ("{'score': 1, 'parts': numpy.ones(2), 'n': numpy.float32(1)}", {"n": 1.0}),
        ("10**400", None),
    ],
)
async def test_a_score_is_read_as_a_reward_functions_result(
    tmp_path: Path, score: str, metrics: dict[str, float] | None
) -> None:
    text = f"""
import numpy
class World:
    def turn(self, text):
        return "Continue."
    def score(self, answer):
        return {score}
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        await played.step(0, Answer("x"), STOP)
        if metrics is None:
            with pytest.raises(EpisodeFailedError, match="return a finite number"):
                await played.close()
        else:
            assert await played.close() == Scored(1.0, 1.0, metrics)


async def test_a_long_result_is_cut_before_it_is_sent(tmp_path: Path) -> None:
    text = "class Long:\n    def turn(self, text):\n        return 'x' * 50_000_000\n"
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        seen = await played.step(0, Answer("x"), STOP)
        assert (1 << 20) <= len(seen.messages[0].content) < (1 << 20) + 100


LOOP = """
async def run(task, policy):
    def look(jar: str) -> str:
        '''Look into a jar.'''
    messages = list(task.prompt)
    answer = await policy.chat(messages, [look])
    messages += [answer.message, {"role": "tool", "content": "6", "tool_call_id": "call_0"}]
    answer = await policy.chat(messages)
    return {"score": float(answer.content == task.ground_truth), "asked": 2}
"""


async def test_a_loop_of_ones_own_sends_whole_conversations(tmp_path: Path) -> None:
    async with served(author_file(tmp_path, LOOP), tmp_path) as servers:
        played = episode(servers, row("6"))
        opened = await played.open()
        assert opened.is_whole
        assert [tool.name for tool in opened.tools] == ["look"]
        seen = await played.step(0, calls(("look", {"jar": "C"})), STOP)
        assert [one.role for one in seen.messages] == ["user", "assistant", "tool"]
        assert seen.messages[1].tool_calls[0].name == "look"
        assert (await played.step(1, Answer("6"), STOP)).done
        assert await played.close() == Scored(1.0, 1.0, {"asked": 2.0})


@pytest.mark.parametrize(("given", "is_dropped"), [("", False), (", None", False), (", []", True)])
async def test_a_loop_drops_its_tools_with_an_empty_list_alone(
    tmp_path: Path, given: str, is_dropped: bool
) -> None:
    text = LOOP.replace("policy.chat(messages)", f"policy.chat(messages{given})")
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers, row("6"))
        assert not (await played.open()).drops_tools
        seen = await played.step(0, calls(("look", {"jar": "C"})), STOP)
        assert (seen.tools, seen.drops_tools) == ((), is_dropped)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("'tool_calls': [{'function': {'name': 'a', 'arguments': {'b': 1}}}]", "with json.dumps"),
        ("'tool_calls': [{'name': 'a', 'arguments': '{}'}]", "write OpenAI's form"),
        ("'tool_call_id': 5", "tool_call_id or reasoning"),
    ],
)
async def test_a_malformed_message_of_a_loop_is_named(
    tmp_path: Path, fields: str, said: str
) -> None:
    text = f"""
async def run(task, policy):
    await policy.chat([*task.prompt, {{"role": "assistant", "content": "", {fields}}}])
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        with pytest.raises(EpisodeFailedError, match=f"ValueError: .*{said}"):
            await episode(servers).open()


@pytest.mark.parametrize(
    "tool",
    [
        "'look'",
        "{'function': {'description': 'Look.'}}",
        "{'function': None}",
        "{'name': 5}",
        "lambda jar: jar",
    ],
)
async def test_a_malformed_tool_of_a_loop_is_a_value_error(tmp_path: Path, tool: str) -> None:
    text = f"""
async def run(task, policy):
    await policy.chat(task.prompt, [{tool}])
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        with pytest.raises(EpisodeFailedError, match=r"ValueError: a tool .*; "):
            await episode(servers).open()


async def test_a_loop_that_the_run_ends_may_score_what_it_has(tmp_path: Path) -> None:
    text = """
from sluice.environment.loops import EpisodeOver
async def run(task, policy):
    try:
        while True:
            await policy.chat(task.prompt)
    except EpisodeOver:
        return 0.25
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        await played.step(0, Answer("a"), STOP)
        scored = await played.close()
        assert scored is not None
        assert scored.score == 0.25


async def test_an_answer_goes_to_the_question_that_asked_for_it_or_to_none(tmp_path: Path) -> None:
    text = """
import asyncio
from pathlib import Path
async def run(task, policy):
    folder = Path(__file__).parent
    asking = asyncio.ensure_future(policy.chat(task.prompt))
    while not (folder / "late").exists():
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
    (folder / "passed").touch()
    again = [*task.prompt, {"role": "user", "content": "Be quick."}]
    return float((await policy.chat(again)).content == "of the second")
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        (tmp_path / "late").touch()
        await eventually((tmp_path / "passed").exists)
        seen = await played.step(0, Answer("of the first"), STOP)
        assert [one.content for one in seen.messages][1:] == ["Be quick."]
        assert (await played.step(1, Answer("of the second"), STOP)).done
        assert await played.close() == Scored(1.0, 1.0, {"acc": 1.0})


async def test_an_error_of_a_loop_fails_its_episode_alone(tmp_path: Path) -> None:
    text = """
async def run(task, policy):
    answer = await policy.chat(task.prompt)
    if answer.content == "bad":
        raise KeyError("gone")
    await policy.chat([{"role": "user", "content": "again"}])
    return 1.0
"""
    async with served(author_file(tmp_path, text), tmp_path) as servers:
        bad, good = episode(servers), episode(servers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bad.open())
            tasks.create_task(good.open())
        with pytest.raises(EpisodeFailedError, match="KeyError"):
            await bad.step(0, Answer("bad"), STOP)
        await bad.abandon()
        assert not (await good.step(0, Answer("fine"), STOP)).done
        assert (await good.step(1, Answer("fine"), STOP)).done
        assert await good.close() is not None


@pytest.fixture
def verl_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSource:
    monkeypatch.syspath_prepend(tmp_path)
    FUNCTION_TOOL_REGISTRY.clear()  # a process loads one file; other tests have loaded theirs
    return verl_tools(tmp_path)


async def test_verls_tools_run_unchanged(tmp_path: Path, verl_source: EnvironmentSource) -> None:
    notes = {"note": {"create_kwargs": {"first": "a"}}}
    async with served(verl_source, tmp_path) as servers:
        played = episode(servers, row(tools_kwargs=notes))
        other = episode(servers, row(tools_kwargs=notes, tool_selection=["note"]))
        opened, (only,) = await played.open(), (await other.open()).tools
        tools = {tool.name: json.loads(tool.parameters) for tool in opened.tools}
        assert sorted(tools) == ["calculator", "note", "web_search"]
        described = tools["calculator"]["properties"]["expression"]["description"]
        assert described == 'e.g. "(3+4)*5".'
        assert only.name == "note"
        made = calls(
            ("calculator", {"expression": "(3+4)*5"}),
            ("web_search", {"query": "x"}),
            ("note", {"text": "b"}),
            ("note", {"text": "c"}),
            ("note", {}),
        )
        seen = await played.step(0, made, STOP)
        texts = [one.content for one in seen.messages]
        assert texts[:2] == ["35", '{"found": "x", "count": 3}']
        # The instance lives as long as the episode, and each episode has its own.
        assert texts[2:4] == ["['a', 'b'] 2", "['a', 'b', 'c'] 2"]
        assert texts[4] == "Error executing tool 'note': 'text'"
        assert seen.reward == 0.5
        assert (await played.step(1, Answer("35"), STOP)).done
        assert await played.close() is None
        seen = await other.step(0, calls(("note", {"text": "d"})), STOP)
        assert seen.messages[0].content == "['a', 'd'] 1"


@pytest.mark.parametrize(
    ("selection", "offered"),
    [
        (None, ["note", "calculator", "web_search"]),
        ([], ["note", "calculator", "web_search"]),
        (["note", "gone", "web_search", "note"], ["note", "web_search"]),
        (["gone"], []),
    ],
)
async def test_verls_tools_are_offered_in_its_order_and_an_empty_selection_is_none(
    tmp_path: Path,
    verl_source: EnvironmentSource,
    selection: list[str] | None,
    offered: list[str],
) -> None:
    """verl/tools/tool_registry.py: classes, then functions by name; else the row's own order."""
    notes = {"note": {"create_kwargs": {"first": "a"}}}
    async with served(verl_source, tmp_path) as servers:
        asked = row(tools_kwargs=notes, tool_selection=selection)
        opened = await episode(servers, asked).open()
        assert [tool.name for tool in opened.tools] == offered


VALUES = """
from verl.tools.function_tool import function_tool

@function_tool
def value(which: str):
    '''Return a value.'''
    return {
        "bool": True,
        "list": ["a"],
        "none": None,
        "map": {"a": True},
        "rewarded": (5, 0.25),
        "without": ("b", None, None),
        "four": (1, 2, 3, 4),
    }[which]
"""


async def test_the_policy_reads_what_verls_functions_return_as_in_verl(tmp_path: Path) -> None:
    FUNCTION_TOOL_REGISTRY.clear()
    path = author_file(tmp_path, VALUES).path
    async with served(EnvironmentSource(function_tool_path=path), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        wanted = ("bool", "list", "none", "map", "rewarded", "without", "four")
        seen = await played.step(0, calls(*(("value", {"which": one}) for one in wanted)), STOP)
        *texts, refused = [one.content for one in seen.messages]
        assert texts == ["True", "['a']", "None", '{"a": true}', "5", "b"]
        assert "value returned 4 values" in refused
        assert seen.reward == 0.25


async def test_a_tool_of_verls_reads_the_conversation_and_keeps_what_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "verl_history.py").write_text("""
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class History(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        data = kwargs["agent_data"]
        data.extra_fields["n"] = data.extra_fields.get("n", 0) + 1
        said = [one["content"] for one in data.messages[1:]]
        return ToolResponse(text=f"{data.extra_fields['n']} {said}"), 0.0, {}
""")
    config = tmp_path / "tools.yaml"
    config.write_text(
        "tools: [{class_name: verl_history.History, config: {type: native}, tool_schema: "
        "{type: function, function: {name: history, description: Tell., parameters: "
        "{type: object, properties: {}, required: []}}}}]"
    )
    async with served(EnvironmentSource(tool_config_path=str(config)), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        called = calls(("history", {}), content="Hm.")
        first = await played.step(0, called, STOP)
        second = await played.step(1, called, STOP)
        texts = [one.content for seen in (first, second) for one in seen.messages]
        assert texts == ["1 ['Hm.']", """2 ['Hm.', "1 ['Hm.']", 'Hm.']"""]


def test_a_file_of_verls_tools_has_values_of_the_environment_and_numbers_as_verl_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SLUICE_TEST_URL", "http://127.0.0.1:8000")
    (tmp_path / "verl_search.py").write_text("""
from verl.tools.base_tool import BaseTool

given = []

class Search(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        given.append(config)
""")
    config = tmp_path / "tools.yaml"
    config.write_text("""
tools:
  - class_name: verl_search.Search
    config:
      url: ${oc.env:SLUICE_TEST_URL}/retrieve
      key: ${oc.env:SLUICE_TEST_NOT_SET,none}
      eps: 1e-6
      type: native
    tool_schema:
      type: function
      function: {name: search, description: Search., parameters: {type: object, properties: {}}}
""")
    source = EnvironmentSource(tool_config_path=str(config))
    assert [tool.name for tool in source.load().tools] == ["search"]
    url = "http://127.0.0.1:8000/retrieve"
    assert importlib.import_module("verl_search").given == [
        {"url": url, "key": "none", "eps": 1e-6, "type": "native"}
    ]
    monkeypatch.delenv("SLUICE_TEST_URL")
    with pytest.raises(ConfigError, match=r"tools\.yaml.*SLUICE_TEST_URL has no value; set it"):
        source.load()


async def test_each_tool_of_verls_is_released_though_another_release_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verl_releases.py").write_text("""
from pathlib import Path
from verl.tools.base_tool import BaseTool

class Held(BaseTool):
    async def release(self, instance_id, **kwargs):
        Path(__file__).with_name(self.name).touch()
        raise OSError(self.name)
""")
    entry = (
        "{{class_name: verl_releases.Held, config: {{type: native}}, tool_schema: "
        "{{type: function, function: {{name: {0}, description: Hold., parameters: "
        "{{type: object, properties: {{}}}}}}}}}}"
    )
    config = tmp_path / "releases.yaml"
    config.write_text(f"tools: [{entry.format('one')}, {entry.format('two')}]")
    source = EnvironmentSource(tool_config_path=str(config))
    async with served(source, tmp_path) as servers:
        played = episode(servers)
        await played.open()
        with pytest.raises(EpisodeFailedError, match=r"two\.release raised OSError"):
            await played.close()
    assert (tmp_path / "one").exists()
    assert (tmp_path / "two").exists()


def test_the_check_loads_verls_yaml_and_its_classes(verl_source: EnvironmentSource) -> None:
    assert verl_source.tool_config_path is not None
    result = CliRunner().invoke(commands, ["env", "check", verl_source.tool_config_path])
    assert "tool_agent: 1 tool\n  note: Keep a text." in result.output


def test_the_check_shows_of_a_tools_text_what_a_run_shows_the_policy(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        'class Long:\n    def read(self) -> str:\n        """Read."""\n        return "a" * 8000\n'
    )
    result = CliRunner().invoke(commands, ["env", "check", f"{tmp_path}/long.py", "--call", "read"])
    shown = f"tool: {'a' * 128}...(truncated)...{'a' * 128}\n(cut to 256 characters, as in a run; "
    assert shown in result.output
    assert "multi_turn.max_tool_response_length=N keeps more)" in result.output
