"""The filter of system calls, read as the kernel reads it."""

from __future__ import annotations

import struct

import pytest

from sluice.errors import SandboxUnavailableError
from sluice.sandbox.bubblewrap import filter_program

X86, ARM = 0xC000003E, 0xC00000B7
ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050001, 0x80000000


def verdict(machine: str, architecture: int, number: int, argument: int = 0) -> int:
    """Interpret the filter for one call."""
    lines = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    place = accumulator = 0
    while True:
        code, if_true, if_false, value = lines[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x15:
            place += if_true if accumulator == value else if_false
        elif code == 0x35:
            place += if_true if accumulator >= value else if_false
        else:
            return value


@pytest.mark.parametrize(
    ("machine", "architecture", "numbers"),
    [
        ("x86_64", X86, {"read": 0, "clone": 56, "mmap": 9, "last": 450}),
        ("aarch64", ARM, {"read": 63, "clone": 220, "mmap": 222, "last": 450}),
    ],
)
def test_ordinary_calls_pass(machine: str, architecture: int, numbers: dict[str, int]) -> None:
    assert {verdict(machine, architecture, number) for number in numbers.values()} == {ALLOWED}


@pytest.mark.parametrize(
    ("machine", "architecture", "numbers"),
    [
        ("x86_64", X86, {"ptrace": 101, "memfd_create": 319, "mount": 165, "clock_adjtime": 305}),
        ("aarch64", ARM, {"ptrace": 117, "memfd_create": 279, "mount": 40, "clock_adjtime": 266}),
    ],
)
def test_calls_that_no_limit_contains_are_refused(
    machine: str, architecture: int, numbers: dict[str, int]
) -> None:
    assert {verdict(machine, architecture, number) for number in numbers.values()} == {REFUSED}


@pytest.mark.parametrize(
    ("machine", "architecture", "socket"), [("x86_64", X86, 41), ("aarch64", ARM, 198)]
)
@pytest.mark.parametrize(
    ("family", "expected"),
    [(1, ALLOWED), (2, ALLOWED), (10, ALLOWED), (16, REFUSED), (40, REFUSED)],
)
def test_sockets_are_of_unix_and_ip_only(
    machine: str, architecture: int, socket: int, family: int, expected: int
) -> None:
    assert verdict(machine, architecture, socket, family) == expected


def test_calls_by_another_convention_do_not_get_around_the_numbers() -> None:
    assert verdict("x86_64", 0x40000003, 26) == KILLED  # ptrace of 32 bits
    assert verdict("x86_64", X86, 0x40000000 | 521) == REFUSED  # ptrace of x32


def test_a_machine_whose_numbers_are_unknown_is_refused_with_another_way() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"riscv64.*backend=command"):
        filter_program("riscv64")
