"""What runs on accelerators: skipped with the reason where there are too few.

SLUICE_REHEARSE=1 runs on the CPU what does not need a GPU's own counters.
"""

from __future__ import annotations

import pytest

from tests.support.accelerator import is_rehearsal, num_accelerators


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = num_accelerators()
    for item in items:
        if "tests/gpu/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("devices")
        wanted = int(marker.args[0]) if marker else 1
        if there < wanted:
            why = f"needs {wanted} GPUs and torch finds {there}" if there else "torch finds no GPU"
            item.add_marker(pytest.mark.skip(reason=why))
        elif is_rehearsal() and item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason="a rehearsal: needs a real GPU"))
