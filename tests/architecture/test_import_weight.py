"""What must start light imports nothing heavy, counted in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT, python_files

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "vllm", "sglang", "ray")
PROBE = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
heavy = sorted(set({heavy!r}) & set(sys.modules))
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


def modules_of(*folders: str) -> list[str]:
    names = [path.relative_to(ROOT).with_suffix("") for path in python_files(*folders)]
    return [".".join(name.parts).removesuffix(".__init__") for name in names]


@pytest.mark.parametrize(
    "folders",
    [
        ("services/reward",),
        ("sluice/config",),
        ("sluice/data",),
        ("sluice/client", "sluice/rpc", "sluice/codec"),
        ("sluice/concurrency", "sluice/telemetry"),
    ],
    ids=" ".join,
)
def test_importing_every_module_loads_no_torch(folders: tuple[str, ...]) -> None:
    code = PROBE.format(modules=modules_of(*folders), heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_command_answers_help_without_torch() -> None:
    code = PROBE.format(modules=modules_of("sluice/cli"), heavy=("torch", "transformers"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def loaded_after(code: str) -> set[str]:
    """The modules in a fresh process that has run some code."""
    code += "\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


def test_a_command_imports_its_own_module_alone() -> None:
    loaded = loaded_after(
        "from sluice.cli.main import commands; commands(['logs', '--help'], standalone_mode=False)"
    )
    others = set(modules_of("sluice/cli")) - {
        *("sluice.cli", "sluice.cli.main", "sluice.cli.arguments", "sluice.cli.terminal"),
        *("sluice.cli.watch", "sluice.cli.watch.logs"),
    }
    assert "sluice.cli.watch.logs" in loaded
    assert loaded.isdisjoint({*others, "pyarrow", "grpc"})
