"""No server and no channel of ours is opened without asking for credentials."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.support.source_tree import name_of, python_files, syntax_tree

RAW = {
    *("grpc.server", "grpc.aio.server", "grpc.insecure_channel", "grpc.secure_channel"),
    *("grpc.aio.insecure_channel", "grpc.aio.secure_channel"),
}
# The port for probes answers health to everybody.
HOMES = {
    "sluice/launch/health_probe.py",  # asks the probe server of its own host, and loads no more
    "sluice/rpc/client.py",
    "sluice/rpc/server.py",
    "sluice/weights/rendezvous.py",  # by secrets of epochs and runs, and certificates
}


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rsplit(".", 1)[-1]


def takers(tree: ast.AST) -> set[str]:
    """Functions and classes that are called with credentials."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            made_with = (getattr(p, "name", "__init__") for p in node.body if takes_credentials(p))
            found |= {node.name} if "__init__" in made_with else set()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and takes_credentials(node):
            found |= {node.name} - {"__init__"}
    return found


def takes_credentials(node: ast.AST) -> bool:
    """Whether a function has such a parameter, or a line of a class is such a field."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return any(each.arg == "credentials" for each in every)
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "credentials"


@cache
def openers() -> frozenset[str]:
    """Those of the whole program that other files may call."""
    trees = map(syntax_tree, python_files("sluice", "services"))
    return frozenset(name for tree in trees for name in takers(tree) if name[0] != "_")


def without_credentials(tree: ast.AST) -> list[str]:
    """Calls that open something and say nothing of credentials."""
    names = openers() | takers(tree)
    return [
        f"{called(node)}, line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and called(node) in names
        # Channels that are open have got theirs.
        and not any(word.arg in {"credentials", "channels"} for word in node.keywords)
        and not any("credentials" in ast.unparse(argument) for argument in node.args)
    ]


def raw_uses(tree: ast.AST) -> set[str]:
    """gRPC's own openers that are called."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in calls} & RAW


def test_whatever_opens_a_connection_passes_credentials_on() -> None:
    found = {
        name_of(file): missing
        for file in python_files("sluice", "services")
        if (missing := without_credentials(syntax_tree(file)))
    }
    assert found == {}, "pass what service_credentials or client_credentials gave"


def test_every_callable_that_takes_credentials_is_looked_at() -> None:
    known = {"open_channel", "RpcServer", "RunMonitor", "RolloutClient"}
    known |= {"ChannelPool", "Launcher", "survey_waits"}
    assert known <= openers()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def ask(address, *, credentials=OPEN): ...", {"ask"}),
        ("async def ask(credentials, /): ...", {"ask"}),
        ("class Caller:\n def __init__(self, credentials): ...", {"Caller"}),
        ("class Caller:\n credentials: Credentials", {"Caller"}),
        ("class Caller:\n def __init__(self): ...\n def ask(self, credentials): ...", {"ask"}),
        ("def ask(address): ...", set()),
    ],
)
def test_a_taker_of_credentials_is_known_by_its_parameters(code: str, found: set[str]) -> None:
    assert takers(ast.parse(code)) == found


def test_grpcs_own_servers_and_channels_are_made_where_they_are_looked_at() -> None:
    found = {
        name_of(file) for file in python_files("sluice", "services") if raw_uses(syntax_tree(file))
    }
    assert found == HOMES


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("open_channel(address, max_message_bytes=1)", True),
        ("open_channel(address, max_message_bytes=1, credentials=given)", False),
        ("ReplicaCounterCalls(self._credentials)", False),
        ("RpcServer([], [], host='', port=0)", True),
    ],
)
def test_a_forgotten_argument_is_found(code: str, found: bool) -> None:
    assert bool(without_credentials(ast.parse(code))) is found
