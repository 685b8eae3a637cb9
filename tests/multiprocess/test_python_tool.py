"""The Python tool of episodes: it keeps its state, and survives what the policy writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sluice.config.schema.reward import SandboxFusionConfig
from sluice.errors import SandboxUnavailableError
from sluice.sandbox import python_tool
from sluice.sandbox.choice import VARIABLE, as_variable
from sluice.sandbox.python_tool import Python, shorten_middle
from tests.support.reward_process import own_children
from tests.support.sandboxes import OWN_COMMAND, need_bubblewrap


@pytest.fixture(params=["bubblewrap", "command"])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Python]:
    if request.param == "bubblewrap":
        need_bubblewrap()
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, as_variable(OWN_COMMAND, SandboxFusionConfig())[VARIABLE])
    # Time enough for a Python that starts on busy cores.
    monkeypatch.setattr(python_tool, "CALL_S", 300.0)
    tool = Python()
    tool.reset(prompt="?", ground_truth="4")
    yield tool
    tool.close()
    assert own_children() == []


def test_variables_files_and_imports_stay_for_the_episode(tool: Python) -> None:
    assert tool.python("import math\nx = 41") == "(no output)"
    assert tool.python("print('first'); math.floor(x + 1.5)") == "first\n42"
    tool.python("open('notes.txt', 'w').write('kept')")
    assert tool.python("open('notes.txt').read()") == "'kept'"
    tool.reset(prompt="another")
    assert "NameError" in tool.python("x")
    assert "FileNotFoundError" in tool.python("open('notes.txt')")


def test_a_process_that_the_code_forks_answers_no_call(tool: Python) -> None:
    # The fork comes back from the code, as the process does, which then waits for its end.
    tool.python("import os\nfork, number = os.fork(), 0")
    assert tool.python("os.waitpid(fork, 0)[0] == fork") == "True"
    answers = [tool.python("number += 1; number") for _ in range(20)]
    assert answers == [str(number) for number in range(1, 21)]


def test_an_exception_is_what_the_code_printed(tool: Python) -> None:
    text = tool.python("print('before')\n1 / 0")
    assert text.startswith("before\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "interpreter" not in text
    assert "SyntaxError" in tool.python("a b")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "timed out"),
        ("while True: print('x' * 1000)", "output too large"),
        ("import os; os._exit(3)", "the code ended Python"),
        ("import os; os.execv('/bin/sleep', ['sleep', '60'])", "timed out"),
    ],
)
def test_code_that_does_not_come_back_costs_its_state_and_says_so(
    tool: Python, code: str, reason: str
) -> None:
    tool.python("x = 1")
    interpreter = tool._interpreter
    if reason == "timed out":
        patient, interpreter._limits = interpreter._limits, replace(interpreter._limits, wall_s=2.0)
    text = tool.python(code)
    if reason == "timed out":
        interpreter._limits = patient
    assert text.endswith(f"[{reason}; Python starts again, without variables and files]")
    assert len(text) < 9000
    assert "NameError" in tool.python("x")


def test_output_that_is_long_loses_its_middle(tool: Python) -> None:
    text = tool.python("print('a' * 5000 + 'b' * 5000)")
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "2000 characters" in text


def test_the_interpreter_outlives_the_thread_that_made_the_first_call(tool: Python) -> None:
    first = threading.Thread(target=tool.python, args=("x = 7",))
    first.start()
    first.join()
    assert tool.python("x") == "7"


def test_shortening_keeps_both_ends() -> None:
    assert shorten_middle("abcdef", 6) == "abcdef"
    assert shorten_middle("abcdefgh", 4) == "ab\n[... 4 characters ...]\ngh"


def test_a_sandbox_that_fails_is_no_message_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"backend": "command", "command": ["/nowhere"]}
    monkeypatch.setenv(VARIABLE, json.dumps(broken))
    with pytest.raises(SandboxUnavailableError):
        Python()


_STARTS_WHILE_IT_SERVES = """
import asyncio, json, threading
from sluice.config.schema.service import SandboxConfig
from sluice.sandbox.choice import proven_sandbox
import grpc

async def echo(request, context):
    return request

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(echo)

async def serve(ends, serving):
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((Echo(),))
    await server.start()
    call = grpc.aio.insecure_channel(f"127.0.0.1:{port}").unary_unary("/test/Echo")
    async def calls():
        while not ends.is_set():
            await call(b"x")
            serving.set()
    await asyncio.gather(*(calls() for _ in range(4)))
    await server.stop(None)

ends, serving = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: asyncio.run(serve(ends, serving)))
thread.start()
try:
    assert serving.wait(300)
    sandbox = proven_sandbox(SandboxConfig(backend="bubblewrap"))
    print(json.dumps([sandbox.run(["/bin/true"]).exit_code for _ in range(40)]))
finally:
    ends.set()
    thread.join()
"""


def test_sandboxes_start_in_a_process_that_serves_grpc() -> None:
    need_bubblewrap()
    command = [sys.executable, "-c", _STARTS_WHILE_IT_SERVES]
    variables = {name: text for name, text in os.environ.items() if "FORK_SUPPORT" not in name}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=variables
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout) == [0] * 40
