"""Hostile programs reach nothing outside the sandbox, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.errors import SandboxUnavailableError
from sluice.sandbox.bubblewrap import NOBODY, BubblewrapSandbox
from sluice.sandbox.contained import contained_process, descendants
from sluice.sandbox.run_result import MIB, PYTHON, Limits, Result, SandboxEnd
from tests.support.attack_programs import ATTACKS, LIMITS
from tests.support.attack_world import AttackWorld, attack_world, processes_of
from tests.support.sandboxes import need_bubblewrap
from tests.support.source_tree import ROOT


@pytest.fixture(scope="module")
def sandbox() -> BubblewrapSandbox:
    need_bubblewrap()
    return BubblewrapSandbox(LIMITS)


@pytest.fixture(scope="module")
def world() -> Iterator[AttackWorld]:
    with attack_world() as opened:
        yield opened


PATIENT = replace(LIMITS, wall_s=300.0)


def run(sandbox: BubblewrapSandbox, text: str, limits: Limits = PATIENT) -> Result:
    return sandbox.run([PYTHON, "main.py"], {"main.py": text}, limits=limits)


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_contained_that_a_program(
    name: str, sandbox: BubblewrapSandbox, world: AttackWorld
) -> None:
    assert world.breaches(name, sandbox) == []


def test_there_are_forty_attacks() -> None:
    assert len(ATTACKS) == 40


def test_no_program_is_root_outside(sandbox: BubblewrapSandbox) -> None:
    text = "print('up', flush=True); import time; time.sleep(60)"
    with (
        sandbox.command([PYTHON, "-c", text], {}, LIMITS) as command,
        contained_process(command) as running,
    ):
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == b"up\n"
        users = {Path(f"/proc/{pid}").stat().st_uid for pid in descendants(running.process.pid)}
    assert users == {os.geteuid() or NOBODY}


def test_a_program_has_no_capability_and_gets_none(sandbox: BubblewrapSandbox) -> None:
    text = "print([l.split()[1] for l in open('/proc/self/status') if l[:3] in ('Cap', 'NoN')])"
    *capabilities, no_new = eval(run(sandbox, text).stdout)
    assert set(capabilities) == {"0" * 16}
    assert no_new == "1"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("print('x')", SandboxEnd.FINISHED),
        ("import os; os._exit(7)", SandboxEnd.FINISHED),
        ("while True: pass", SandboxEnd.TIMED_OUT),
        ("while True: print('x' * 1000)", SandboxEnd.OUTPUT_TOO_LARGE),
        (
            "import os, time\nfor _ in range(8):\n    os.fork() or (bytearray(200 << 20), "
            "time.sleep(60))\n    held = bytearray(100 << 20)\ntime.sleep(60)",
            SandboxEnd.OUT_OF_MEMORY,
        ),
    ],
)
def test_ends_are_distinguished(sandbox: BubblewrapSandbox, text: str, end: SandboxEnd) -> None:
    # Only the one that reaches it has a limit in which a busy machine may not start it.
    for wall_s in (4.0, 30.0) if end is SandboxEnd.TIMED_OUT else (PATIENT.wall_s,):
        with suppress(SandboxUnavailableError) if wall_s < 30.0 else nullcontext():
            result = run(sandbox, text, replace(LIMITS, wall_s=wall_s))
            break
    assert result.end is end


def test_the_limit_of_cpu_time_ends_a_program_before_that_of_the_clock(
    sandbox: BubblewrapSandbox,
) -> None:
    result = run(sandbox, "while True: pass", replace(PATIENT, cpu_s=1))
    assert result.end is SandboxEnd.TIMED_OUT


def test_output_is_cut_at_its_limit(sandbox: BubblewrapSandbox) -> None:
    text = "import os\nwhile True: os.write(1, b'x' * 65536)"
    result = run(sandbox, text, replace(PATIENT, output_bytes=1000))
    assert result.end is SandboxEnd.OUTPUT_TOO_LARGE
    assert 0 < len(result.stdout) <= 1100


def test_a_gigabyte_of_output_leaves_nothing_behind(sandbox: BubblewrapSandbox) -> None:
    text = (
        "import os\nprint(os.readlink('/proc/self/ns/pid'), flush=True)\n"
        "for _ in range(4): os.fork()\n"
        "for _ in range(16384): os.write(1, b'x' * 65536)"
    )
    result = run(sandbox, text)
    assert result.end is SandboxEnd.OUTPUT_TOO_LARGE
    namespace = result.stdout.split(b"\n")[0].decode()
    assert namespace.startswith("pid:[")
    assert processes_of(namespace) == []


def test_input_and_files_reach_a_program(sandbox: BubblewrapSandbox) -> None:
    text = "import sys; print(sys.stdin.read() + open('data.txt').read())"
    files = {"main.py": text, "data.txt": "é"}
    result = sandbox.run([PYTHON, "main.py"], files, "ü".encode() * MIB, PATIENT)
    assert result.end is SandboxEnd.OUTPUT_TOO_LARGE
    result = sandbox.run([PYTHON, "main.py"], files, "ü".encode(), PATIENT)
    assert (result.exit_code, result.stdout.decode()) == (0, "üé\n")


RUNNING = """
import time
from sluice.sandbox.contained import contained_process
from sluice.sandbox.choice import process_sandbox
from tests.support.attack_programs import LIMITS
from tests.support.sandboxes import BUBBLEWRAP

text = "import os, time; print(os.readlink('/proc/self/ns/pid'), flush=True); time.sleep(600)"
sandbox = process_sandbox(BUBBLEWRAP)
with (
    sandbox.command(["python3", "-c", text], {}, LIMITS) as command,
    contained_process(command) as running,
):
    print(running.process.stdout.readline().decode(), flush=True)
    time.sleep(600)
"""


def test_what_is_in_a_sandbox_ends_with_a_scorer_that_is_killed() -> None:
    need_bubblewrap()
    command = [sys.executable, "-c", RUNNING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as scorer:
        assert scorer.stdout is not None
        namespace = scorer.stdout.readline().strip()
        assert processes_of(namespace)
        scorer.kill()
    ends_s = time.monotonic() + 300
    while processes_of(namespace):
        assert time.monotonic() < ends_s, "it is still there"
        time.sleep(0.02)
