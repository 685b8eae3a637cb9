"""The filter of system calls inside the sandbox: what no namespace and no limit contains.

Refused are: memory that no limit counts (memfd, System V), looking into other processes, mounts and
further namespaces, kernel interfaces with a history of holes, and sockets of other families than
Unix and IP (AF_VSOCK reaches the host of a virtual machine from every network namespace).
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

from sluice.errors import SandboxUnavailableError

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


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter as an array of ``struct sock_filter``, which bwrap reads.

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
    last = len(_FAMILIES) - 1
    for index, family in enumerate(_FAMILIES):
        is_last = index == last
        lines.append((_EQUAL, last - index, 1 if is_last else 0, family))
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, _REFUSE_EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
