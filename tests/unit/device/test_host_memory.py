"""What tensors on the host free is kept for the next ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from sluice.device.cpu import CpuDevice

if sys.argv[1] == "kept":
    CpuDevice().set_device()

def faults_of_a_pass():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        held = [torch.ones(1 << 19) for _ in range(8)]  # 2 MiB each
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_a_pass()
print(faults_of_a_pass())
"""


def _faults(how: str) -> int:
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are glibc's")
def test_a_cpu_in_use_keeps_freed_memory_so_that_the_next_tensors_take_no_page_faults() -> None:
    assert _faults("kept") * 10 < _faults("as ever")
