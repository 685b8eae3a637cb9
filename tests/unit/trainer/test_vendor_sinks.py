"""Each vendor's sink is read back; vendors that are not installed are skipped."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from services.trainer.metrics.sinks import Example, SinkTarget, mlflow_name, open_sinks

METRICS = {"actor/pg_loss": 0.25, "val-core/math_dapo/acc/mean@1": 0.5}
LATE = {"val/failed": 0.0}
SETTINGS = {"trainer.project_name": "dapo/qwen3", "data.train_batch_size": 64}
# Vendors deprecate things of their own at import.
pytestmark = pytest.mark.filterwarnings("ignore")


def vendor(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip(name)
    return module


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "MLFLOW_TRACKING_URI",
        "SWANLAB_MODE",
        "SWANLAB_API_KEY",
        "TENSORBOARD_DIR",
        "SWANLAB_LOG_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no.netrc"))
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "swanlab"))


async def write_run(name: str, run_dir: Path) -> None:
    """Write two steps, a late validation of the first one, and one validation example."""
    target = SinkTarget(run_dir, "dapo/qwen3 math", "run/1", SETTINGS)
    (sink,) = await open_sinks([name], target)
    sink.write(1, METRICS)
    sink.write(2, {**METRICS, "actor/pg_loss": float("nan")})
    sink.write(1, LATE)
    sink.write_generations(2, [Example("1 + 1 | 2\nx", "out 2", "2", 1.0)])
    sink.close()


async def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    vendor("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await write_run("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == METRICS.keys() | LATE.keys()
    assert [(one.step, one.value) for one in events.Scalars("val/failed")] == [(1, 0.0)]
    found = events.Scalars("val-core/math_dapo/acc/mean@1")
    assert [(one.step, one.value) for one in found] == [(1, 0.5), (2, 0.5)]
    (text,) = events.Tensors("val/generations/text_summary")
    assert b"1 + 1 \\| 2<br>x | out 2 | 1 |" in text.tensor_proto.string_val[0]


def leveldb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of wandb's offline file: LevelDB's log format after a header of 7 bytes."""
    data, block, whole = file.read_bytes(), 32768, b""
    position = 7
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in {1, 4}:
            yield whole
            whole = b""


async def settled(file: Path) -> None:
    """wandb's own process may still write for a moment after the run has finished."""
    async with asyncio.timeout(60.0):
        before = -1
        while (size := file.stat().st_size) != before or size <= 7:
            before = size
            await asyncio.sleep(0.5)


async def test_wandb_writes_offline_without_a_key_and_without_asking(tmp_path: Path) -> None:
    vendor("wandb")
    from wandb.proto import wandb_internal_pb2

    await write_run("wandb", tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    await settled(file)
    run, rows = None, {}
    for payload in leveldb_records(file):
        record = wandb_internal_pb2.Record.FromString(payload)
        if record.WhichOneof("record_type") == "run":
            run = record.run
        elif record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                rows[record.history.step.num, name] = json.loads(item.value_json)
    assert run is not None
    assert (run.project, run.display_name) == ("dapo-qwen3-math", "run/1")
    assert rows[1, "val-core/math_dapo/acc/mean@1"] == 0.5
    assert rows[1, "actor/pg_loss"] == 0.25
    assert rows[2, "val-core/math_dapo/acc/mean@1"] == 0.5
    # wandb drops what comes with a step below the last one.
    assert (rows[2, "val/failed"], rows[2, "val/step"]) == (0.0, 1)
    (table,) = file.parent.rglob("*.table.json")
    found = json.loads(table.read_text(encoding="utf-8"))
    assert found["columns"] == ["step", "input", "output", "score"]
    assert found["data"] == [[2, "1 + 1 | 2\nx", "out 2", 1.0]]


async def test_mlflow_reads_the_run_back(tmp_path: Path) -> None:
    vendor("mlflow")
    from mlflow.tracking import MlflowClient

    await write_run("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("dapo/qwen3 math")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run/1", "FINISHED")
    assert run.data.params["data.train_batch_size"] == "64"
    history = client.get_metric_history(run.info.run_id, "val-core/math_dapo/acc/mean_at_1")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.5)]
    (table,) = (tmp_path / "mlruns").rglob("val_generations/2.json")
    assert json.loads(table.read_text())["data"] == [[2, "1 + 1 | 2\nx", "out 2", 1.0]]


async def test_a_second_run_of_an_mlflow_experiment_joins_it(tmp_path: Path) -> None:
    vendor("mlflow")
    from mlflow.tracking import MlflowClient

    await write_run("mlflow", tmp_path)
    await write_run("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("dapo/qwen3 math")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 2


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("val-core/a/acc/mean@1", "val-core/a/acc/mean_at_1"),
        ("a(b)·c", "a_b__c"),
        ("//a/../b/./c/", "a/b/c"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_name_that_mlflow_refuses_is_mapped(name: str, mapped: str) -> None:
    assert mlflow_name(name) == mapped


async def test_swanlab_writes_offline_without_a_key(tmp_path: Path) -> None:
    vendor("swanlab")
    await write_run("swanlab", tmp_path)
    (file,) = (tmp_path / "swanlog").glob("run-*/backup.swanlab")
    data = file.read_bytes().decode(errors="replace")
    assert '"name": "dapo-qwen3-math"' in data
    scalars = re.findall(
        r'"data": ([0-9.]+), [^{}]*\}, "key": "val-core/math_dapo/acc/mean@1", "step": (\d)', data
    )
    assert scalars == [("0.5", "1"), ("0.5", "2")]
    assert '"key": "val/generations"' in data


async def test_trackio_reads_its_database_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trackio fixes its folder when it is imported, which another test may have done.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    vendor("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    await write_run("trackio", tmp_path)
    project = "dapo-qwen3-math"
    assert (Path(utils.TRACKIO_DIR) / f"{project}.db").is_file()
    assert SQLiteStorage.get_runs(project) == ["run/1"]
    rows = SQLiteStorage.get_logs(project, "run/1")
    found = [(row["step"], row["val-core/math_dapo/acc/mean@1"]) for row in rows[:2]]
    assert found == [(1, 0.5), (2, 0.5)]
    assert "out 2" in json.dumps(rows[-1]["val/generations"])
