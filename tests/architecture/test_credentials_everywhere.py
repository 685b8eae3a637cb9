"""No server and no channel of ours is opened without asking for credentials."""

from __future__ import annotations

import ast

import pytest

from tests.support.source_tree import name_of, python_files, syntax_tree

OPENERS = {
    *("open_channel", "RpcServer", "PolicyClient", "RunMonitor", "RolloutClient"),
    *("ReplicaClient", "ReplicaCounterCalls"),
}
RAW = {
    *("grpc.server", "grpc.aio.server", "grpc.insecure_channel", "grpc.secure_channel"),
    *("grpc.aio.insecure_channel", "grpc.aio.secure_channel"),
}
HOMES = {"sluice/rpc/channel.py", "sluice/rpc/server.py"}


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rsplit(".", 1)[-1]


def without_credentials(tree: ast.AST) -> list[str]:
    """Calls that open something and say nothing of credentials."""
    return [
        f"{called(node)}, line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and called(node) in OPENERS
        # The credentials of `ReplicaCounterCalls` are all that it takes.
        and not any(word.arg == "credentials" for word in node.keywords)
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


def test_grpcs_own_servers_and_channels_are_made_in_one_place_each() -> None:
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
