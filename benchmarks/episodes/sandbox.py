"""How many of forty hostile programs the sandbox contains, and how soon it is gone after its limit.

sandbox_contained  programs that reached nothing outside and left nothing behind
reclaim_s          longest time from the limit of a program that hangs, forks or prints a gigabyte
                   until nothing is left of it (a run's result comes no sooner)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.parts import Part
from sluice.config.schema.service import SandboxConfig
from sluice.sandbox.choice import process_sandbox
from sluice.sandbox.run_result import PYTHON, Sandbox
from tests.support.attack_programs import ATTACKS, LIMITS
from tests.support.attack_world import attack_world

WALL_S = 2.0
HANGING: Mapping[str, str] = {
    "hangs": "while True: pass",
    "sleeps": "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks away": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        time.sleep(600)\ntime.sleep(600)"
    ),
    "prints a gigabyte": (
        "import os, time\nfor _ in range(16384): os.write(1, b'x' * 65536)\ntime.sleep(600)"
    ),
}
"""Programs that end at a limit only."""


def sandbox_figures() -> Mapping[str, float]:
    """Return the figures of bubblewrap on this machine.

    Raises:
        SandboxUnavailableError: it does not work here.
    """
    sandbox = process_sandbox(SandboxConfig(backend="bubblewrap"))
    with attack_world() as world:
        contained = sum(not world.breaches(name, sandbox) for name in ATTACKS)
    return {
        "sandbox_contained": contained,
        "reclaim_s": max(_reclaimed_s(sandbox, text) for text in HANGING.values()),
    }


def _reclaimed_s(sandbox: Sandbox, text: str) -> float:
    limits = replace(LIMITS, wall_s=WALL_S)
    began_s = time.monotonic()
    sandbox.run([PYTHON, "main.py"], {"main.py": text}, limits=limits)
    return max(time.monotonic() - began_s - WALL_S, 0.0)


PART = Part(lambda _: sandbox_figures(), most={"reclaim_s": 2.0}, least={"sandbox_contained": 40.0})
