"""The space on a disk is read by a thread that may hang without anybody else."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sluice.telemetry import process
from sluice.telemetry.process import DiskSpace


def test_the_space_is_the_file_systems(tmp_path: Path) -> None:
    disk = DiskSpace(tmp_path)
    disk.start()
    capacity, found = disk.capacity(), os.statvfs(tmp_path)
    disk.stop()
    assert capacity is not None
    assert capacity.size_bytes == found.f_blocks * found.f_frsize
    assert 0 < capacity.free_bytes <= capacity.size_bytes


def test_while_the_file_system_hangs_the_last_reading_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hangs, proceed, looks = os.statvfs, threading.Event(), threading.Event(), list[Path]()

    def statvfs(folder: Path) -> Any:
        looks.append(folder)
        if len(looks) > 1:
            hangs.set()
            proceed.wait(60)
        return real(folder)

    monkeypatch.setattr(process.os, "statvfs", statvfs)
    disk = DiskSpace(tmp_path, interval_s=0.001)
    disk.start()
    assert hangs.wait(20)
    assert disk.capacity() is not None
    disk.stop()
    proceed.set()


def test_without_the_folder_there_is_no_reading(tmp_path: Path) -> None:
    disk = DiskSpace(tmp_path / "absent")
    disk.start()
    assert disk.capacity() is None
    disk.stop()
