"""What tensors on the host free is kept for the next ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from sluice.device import cpu

SCRIPT = """
import ctypes, resource, sys

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "kept":
    from sluice.device.cpu import keep_freed_memory
    keep_freed_memory()

def page_faults(size=16 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(size)
    ctypes.memset(block, 1, size)
    library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

page_faults()
print(page_faults())
"""


def _faults_the_second_time(how: str) -> int:
    # The library's own limits, whatever the caller has set.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's")
def test_a_block_takes_the_pages_of_one_that_was_freed_before() -> None:
    assert _faults_the_second_time("kept") < 10 < _faults_the_second_time("given back")


def test_a_cpu_that_is_made_current_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: calls.append("kept"))
    device = cpu.CpuDevice()
    assert calls == []
    device.set_device()
    assert calls == ["kept"]
