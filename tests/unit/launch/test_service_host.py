"""The body of an actor: it keeps one real process and reports it."""

from __future__ import annotations

import asyncio
import signal
import sys

from sluice.launch.cluster.nodes import ServiceHost
from tests.support.scripted_children import POLITE, WAIT_S, until_gone

ADDRESS = "127.0.0.1"


async def started(host: ServiceHost, script: str) -> int:
    pid, problem = await host.start("rollout-0", [sys.executable, "-c", script], {"WHO": "me"})
    assert not problem
    return pid


async def all_lines(host: ServiceHost, pid: int) -> list[str]:
    found: list[str] = []
    is_over = False
    async with asyncio.timeout(WAIT_S):
        while not is_over:
            lines, is_over = await host.lines(pid)
            found += lines
    return found


async def end(host: ServiceHost, pid: int) -> int:
    """Kills the process and reads its output to the end; the loop has nothing of it left."""
    await host.kill(pid)
    await all_lines(host, pid)
    async with asyncio.timeout(WAIT_S):
        return await host.ended(pid)


async def test_it_tells_its_nodes_address_and_ports_that_are_free_and_differ() -> None:
    address, ports = await ServiceHost(ADDRESS).place(3)
    assert address == ADDRESS
    assert len(set(ports)) == 3


async def test_a_process_has_the_variables_it_was_given_and_all_of_its_lines_are_reported() -> None:
    host = ServiceHost(ADDRESS)
    script = "import os\nfor i in range(500): print(i, os.environ['WHO'])"
    pid = await started(host, script)
    assert await all_lines(host, pid) == [f"{i} me" for i in range(500)]
    assert await host.ended(pid) == 0


async def test_a_line_is_reported_while_the_process_runs() -> None:
    host = ServiceHost(ADDRESS)
    pid = await started(host, POLITE.format(code=7))
    async with asyncio.timeout(WAIT_S):
        assert await host.lines(pid) == (["ready"], False)
        await host.terminate(pid)
        assert await all_lines(host, pid) == ["bye"]
        assert await host.ended(pid) == 7


async def test_a_process_that_is_killed_has_ended_with_that_signal() -> None:
    host = ServiceHost(ADDRESS)
    pid = await started(host, POLITE.format(code=0))
    assert await end(host, pid) == -signal.SIGKILL


async def test_a_process_of_an_earlier_host_has_ended_with_it_and_is_not_touched() -> None:
    host = ServiceHost(ADDRESS)
    pid = await started(host, POLITE.format(code=0))
    other = pid + 1
    assert await host.ended(other) == -signal.SIGKILL
    assert await host.lines(other) == ([], True)
    await host.kill(other)
    await host.terminate(other)
    assert await host.lines(pid) == (["ready"], False)
    await end(host, pid)


async def test_a_second_start_ends_what_the_first_one_left() -> None:
    host = ServiceHost(ADDRESS)
    first = await started(host, POLITE.format(code=0))
    second = await started(host, POLITE.format(code=0))
    await until_gone(first)
    await end(host, second)


async def test_a_start_that_is_repeated_before_the_first_has_ended_leaves_one_process() -> None:
    host = ServiceHost(ADDRESS)
    async with asyncio.TaskGroup() as tasks:
        starts = [tasks.create_task(started(host, POLITE.format(code=0))) for _ in range(2)]
    first, second = (start.result() for start in starts)
    await until_gone(first)
    await end(host, second)


async def test_a_program_that_is_not_there_is_a_reason_and_no_process() -> None:
    pid, problem = await ServiceHost(ADDRESS).start("reward", ["/no/such/python"], {})
    assert pid == 0
    assert "/no/such/python" in problem
