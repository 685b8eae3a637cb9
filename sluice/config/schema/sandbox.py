"""`sluice.sandbox.*`: where programs of the policy run, and their limits."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import PositiveInt, Section

BackendKey = Literal["bubblewrap", "command", "sandbox_fusion"]


class SandboxConfig(Section, frozen=True):
    """The sandbox of programs that the policy writes; without one nothing runs them."""

    backend: BackendKey | None = None
    """bubblewrap: namespaces of this machine, without privileges; command: your own sandbox;
    sandbox_fusion: a server of SandboxFusion. None: sandbox_fusion if reward.sandbox_fusion.url is
    set, else programs are refused.
    """

    command: list[str] = msgspec.field(default_factory=list)
    """Your own sandbox, such as gVisor or nsjail: a program and its arguments. {folder} is a folder
    with the program's files; the program's own command line follows. Exit code 125 means that the
    sandbox has failed.
    """

    python: str | None = None
    """Python interpreter inside the sandbox; none: this process's, or python3 of the system if the
    sandbox's user cannot reach it.
    """

    memory_mb: PositiveInt = 1024
    """Memory of all processes of a program together, and address space of each, MiB."""

    tmp_mb: PositiveInt = 64
    """Size of a program's /tmp, MiB, which holds its files; no file can be larger."""

    processes: PositiveInt = 64
    """Most processes and threads of a program at once."""
