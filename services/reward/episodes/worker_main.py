"""The process that runs a user's environment, so that a hang, a crash or a leak ends with it.

`workers` starts it as ``python -m services.reward.episodes.worker_main PARENT_PID ADDRESS SETUP``.
It loads the environment, serves it at the address, writes a `WorkerReply` to standard output, and
runs until it is killed or its parent dies. What the environment prints goes to standard error.

It bounds its own address space, open files, processes and output. The wall clock is watched from
outside.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from services.reward.grading.limits import (
    COUNTED_EVERY_S,
    MAX_OUTPUT_BYTES,
    OutputLimit,
    ProcessLimit,
    end_with_parent,
    limit_resources,
    limited_output,
)
from sluice.environment.episodes import Environment
from sluice.environment.servicer import served_environment
from sluice.environment.source import EnvironmentSource
from sluice.errors import SluiceError
from sluice.rpc.credentials import OPEN
from sluice.sandbox.choice import inherited_config, process_sandbox, proven_sandbox

MAX_OPEN_FILES = 4096
_PYTHON_TOOL = "sluice.sandbox.python_tool"
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class WorkerSetup(msgspec.Struct, frozen=True):
    """The environment that the process runs, and its memory limit."""

    source: EnvironmentSource
    memory_bytes: int


class WorkerReply(msgspec.Struct, frozen=True):
    """Whether the process serves; `error` says why not."""

    error: str | None = None


async def _serve(environment: Environment, address: str, replies: int, output: OutputLimit) -> None:
    processes = ProcessLimit()
    async with served_environment(environment, address, 0, credentials=OPEN):
        _reply(replies, WorkerReply())
        while True:
            await asyncio.sleep(COUNTED_EVERY_S)
            processes.renew()
            output.begin_request()


def load_checked(source: EnvironmentSource) -> Environment:
    """Return the environment; if it uses the Python tool, check first that the sandbox runs a
    program.

    Raises:
        ConfigError: the environment cannot be loaded, or no sandbox for it is configured.
        SandboxUnavailableError: the sandbox does not work here.
    """
    environment = source.load()
    if _PYTHON_TOOL in sys.modules:
        config = inherited_config()
        process_sandbox(config)  # refuses sandboxes that keep no state
        proven_sandbox(config)
    return environment


def _reply(replies: int, reply: WorkerReply) -> None:
    os.write(replies, msgspec.json.encode(reply) + b"\n")
    os.close(replies)


def main(parent_pid: int, address: str, setup_text: str) -> int:
    """Serve until killed; return 1 if the environment cannot be loaded."""
    replies = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)
    end_with_parent(parent_pid)
    setup = msgspec.json.decode(setup_text, type=WorkerSetup)
    limit_resources(setup.memory_bytes, MAX_OPEN_FILES)
    with limited_output(MAX_OUTPUT_BYTES) as output:
        try:
            environment = load_checked(setup.source)
        except SluiceError as error:
            _reply(replies, WorkerReply(str(error)))
            return 1
        asyncio.run(_serve(environment, address, replies, output))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
