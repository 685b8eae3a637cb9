"""`make demo-clients` on a machine with few cores."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tools.client_demo import __main__ as demo

_CLIENT = """
import json, sys, time
json.loads(sys.stdin.readline())
with open({journal!r}, "a") as journal:
    print("began", file=journal, flush=True)
    time.sleep(0.1)
    print("ready", file=journal, flush=True)
print(json.dumps({{"ready": True}}), flush=True)
sys.stdin.readline()
"""


async def test_few_clients_start_at_a_time_and_all_begin_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    program = _CLIENT.format(journal=str(journal))
    monkeypatch.setattr(demo, "_COMMANDS", {demo.PYTHON: (sys.executable, "-c", program)})
    clients = [demo.Client(f"python-{number}", demo.PYTHON, []) for number in range(10)]

    async with asyncio.timeout(60):
        await demo._run_clients(clients, {})

    starting, most = 0, 0
    for line in journal.read_text().split():
        starting += 1 if line == "began" else -1
        most = max(most, starting)
    assert starting == 0
    assert 1 <= most <= demo._STARTING
