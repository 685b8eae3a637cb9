"""What attacks aim at, and what they did to it."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from sluice.errors import SandboxUnavailableError
from sluice.sandbox.run_result import PYTHON, Sandbox
from tests.support.attack_programs import ESCAPED, LIMITS, WAITS, AttackTarget, attack_program

_PATIENT_S = 30.0


class AttackWorld:
    """A machine's part outside the sandbox. Made by `attack_world`."""

    def __init__(
        self, listeners: list[socket.socket], file: Path, victim: subprocess.Popen[bytes]
    ) -> None:
        self._listeners, self._file, self._victim = listeners, file, victim
        self._content = file.read_text()
        self.target = AttackTarget(
            port=listeners[0].getsockname()[1],
            socket=listeners[1].getsockname()[1:].decode(),
            file=str(file),
            process=victim.pid,
            secret=self._content,
        )

    def breaches(self, name: str, sandbox: Sandbox) -> list[str]:
        """Run an attack; return all that it reached, and all that is left of it."""
        text = attack_program(name, self.target)
        # A busy machine may take all of the attack's time to start it.
        for wall_s in (_PATIENT_S,) if name in WAITS else (LIMITS.wall_s, _PATIENT_S):
            limits = replace(LIMITS, wall_s=wall_s)
            with suppress(SandboxUnavailableError) if wall_s < _PATIENT_S else nullcontext():
                result = sandbox.run([PYTHON, "main.py"], {"main.py": text}, limits=limits)
                if result.stdout:
                    break
        namespace, *lines = result.stdout.decode(errors="replace").splitlines() or [""]
        found = [line for line in lines if line.startswith(ESCAPED)]
        if not namespace.startswith("pid:["):
            found.append(f"did not run: {result}")
        if len(result.stdout) + len(result.stderr) > LIMITS.output_bytes + 64:
            found.append("printed more than it may")
        found += [f"left process {pid}" for pid in processes_of(namespace)]
        if self._victim.poll() is not None:
            found.append("killed a process outside")
        if self._file.read_text() != self._content:
            found.append("changed a file outside")
            self._file.write_text(self._content)
        for listener in select.select(self._listeners, [], [], 0)[0]:
            listener.accept()[0].close()
            found.append("connected to a socket outside")
        return found


def processes_of(namespace: str) -> list[int]:
    """Return the processes of a namespace of processes, as ``pid:[number]``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str((entry / "ns/pid").readlink()) == namespace:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@contextmanager
def attack_world() -> Iterator[AttackWorld]:
    """Open sockets, write a file that all users may read and write, and start a process."""
    with ExitStack() as closing:
        listeners = []
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, f"\0sluice-{secrets.token_hex(8)}"),
        ):
            listener = closing.enter_context(socket.socket(family))
            listener.bind(address)
            listener.listen()
            listeners.append(listener)
        # Not in a folder of a test: only root may enter those.
        file = Path(closing.enter_context(tempfile.NamedTemporaryFile()).name)
        file.write_text(secrets.token_hex(16))
        file.chmod(0o666)
        # As the sandbox's user where possible: only the namespace keeps that one from a signal.
        user = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
        victim = subprocess.Popen(["/bin/sleep", "600"], **user)
        closing.callback(victim.wait)
        closing.callback(victim.kill)
        os.environ["SLUICE_TEST_SECRET"] = file.read_text()
        closing.callback(os.environ.pop, "SLUICE_TEST_SECRET")
        yield AttackWorld(listeners, file, victim)
