"""What a replica refuses when it starts, and how a start that fails ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.rollout import __main__ as replica
from sluice.config.loading.loader import load_config

_ROOT = Path(__file__).parents[3]
_ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("group", [f"{_ROLLOUT}.n", f"{_ROLLOUT}.val_kwargs.n"])
def test_a_replica_that_never_has_capacity_for_a_group_does_not_start(
    group: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data:\n  train_batch_size: 8\n", encoding="utf-8")
    settings = (f"{group}=8", f"{_ROLLOUT}.max_num_seqs=4", "sluice.rollout.max_queued=3")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "services.rollout", "--config", str(config)),
            *("--name", "replica-0", *settings),
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert (
        f"start of replica replica-0): {group} = 8 is more than a replica takes: "
        f"{_ROLLOUT}.max_num_seqs = 4 and sluice.rollout.max_queued = 3 waiting"
    ) in ended.stderr


async def test_a_defect_after_the_engine_has_started_stops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []

    class Engine:
        async def start(self) -> None:
            did.append("start")

        async def stop(self) -> None:
            did.append("stop")

    def prove() -> str:
        raise RuntimeError("a template's defect")

    encoder = SimpleNamespace(prove_continuations=prove)
    monkeypatch.setattr(replica, "prepare_process", lambda *_, **__: None)
    monkeypatch.setattr(replica, "_encoder", lambda _: encoder)
    monkeypatch.setattr(replica, "create_engine", lambda _: Engine())
    with pytest.raises(RuntimeError, match="a template's defect"):
        await replica._run_replica(load_config(None, []), "replica-0")
    assert did == ["start", "stop"]
