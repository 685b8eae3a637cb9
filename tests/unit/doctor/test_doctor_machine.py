"""Findings about devices, limits, memory, disk, CPUs and the clock, from facts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer

import pytest

from sluice.device.ascend_checks import AscendDemand, AscendHost
from sluice.doctor.files import (
    DiskFacts,
    checkpoint_bytes,
    checkpoints_kept,
    disk_findings,
    nearest_folder,
)
from sluice.doctor.finding import GIB, MIB
from sluice.doctor.machine import (
    MemoryFacts,
    MemoryPart,
    NpuFacts,
    OpenFilesFacts,
    SharedMemoryFacts,
    ThreadFacts,
    available_bytes,
    available_cpus,
    check_npus,
    gpu_count_findings,
    memory_findings,
    needed,
    npu_findings,
    open_files_findings,
    shared_memory_findings,
    thread_findings,
)
from sluice.doctor.network import (
    ClockFacts,
    Skew,
    check_clock,
    clock_findings,
    folder_skew,
    http_skew,
    mount_kind,
)
from sluice.launch.device_share import DeviceShare
from tests.support.doctor_findings import only, run_of, severities, write_model


def npus(*, wanted: int, files: int = 0, package: str | None = None) -> NpuFacts:
    host = AscendHost({"ASCEND_HOME_PATH": "/cann"}, "2.9.0", package, files)
    return NpuFacts(host, package is not None, AscendDemand(wanted, collectives_on_device=False))


def test_no_npu_is_fine_where_none_is_asked_for() -> None:
    only(npu_findings(npus(wanted=0)), "ok")


def test_what_an_npu_process_would_refuse_is_a_problem() -> None:
    assert severities(npu_findings(npus(wanted=1))) == ["problem", "problem"]
    only(npu_findings(npus(wanted=2, files=2, package="2.9.0")), "ok")


def test_a_package_without_devices_is_a_warning_where_no_npu_is_asked_for() -> None:
    assert set(severities(npu_findings(npus(wanted=0, package="2.9.0")))) == {"warning"}


def test_a_run_that_asks_for_npus_is_told_what_this_machine_lacks() -> None:
    found = list(check_npus(run_of("trainer.device=npu", "sluice.rollout.device=npu")))
    assert "problem" in severities(found)
    assert any("torch_npu is not installed" in one.what for one in found)


def test_a_run_with_vllm_on_npus_is_told_that_its_plugin_is_missing() -> None:
    engine = "actor_rollout_ref.rollout.name=vllm"
    with_vllm = list(check_npus(run_of(engine, "trainer.device=cpu", "sluice.rollout.device=npu")))
    assert any("vllm_ascend is not installed" in one.what for one in with_vllm)
    trained = list(check_npus(run_of(engine, "trainer.device=npu", "sluice.rollout.device=cpu")))
    assert not any("vllm_ascend" in one.what for one in trained)


@pytest.mark.parametrize(
    ("replicas", "on_device", "severity"),
    [(2, True, "ok"), (3, True, "problem"), (3, False, "warning")],
)
def test_gpus_are_counted_for_every_process(replicas: int, on_device: bool, severity: str) -> None:
    share = DeviceShare(("0", "1", "2", "3"), trainer_ranks=2, devices_per_replica=1)
    found = gpu_count_findings(share, replicas, collectives_on_device=on_device)
    only(found, severity)


def test_a_run_on_cpus_takes_no_gpu() -> None:
    only(gpu_count_findings(DeviceShare((), 0, 0), 4, collectives_on_device=True), "ok")


@pytest.mark.parametrize(
    ("soft", "hard", "severity", "reported"),
    [
        (1024, 4096, "ok", ""),
        (-1, -1, "ok", ""),
        (512, 4096, "warning", "ulimit -n 784"),
        (512, 512, "warning", "raise the hard limit to 784"),
    ],
)
def test_open_files_are_enough_for_replicas_and_clients(
    soft: int, hard: int, severity: str, reported: str
) -> None:
    found = only(open_files_findings(OpenFilesFacts(soft, hard, 1, 512)), severity)
    assert reported in found.remedy


@pytest.mark.parametrize(
    ("total", "free", "processes", "severity"),
    [
        (64 * MIB, 64 * MIB, 0, "ok"),
        (None, 0, 0, "ok"),
        (64 * MIB, 64 * MIB, 2, "warning"),
        (None, 0, 2, "warning"),
        (8 * GIB, 8 * GIB, 8, "ok"),
        (8 * GIB, GIB, 8, "warning"),
    ],
)
def test_shared_memory_matters_where_processes_are_on_devices(
    total: int | None, free: int, processes: int, severity: str
) -> None:
    only(shared_memory_findings(SharedMemoryFacts(total, free, processes)), severity)


@pytest.mark.parametrize(
    ("checkpoint", "kept", "free", "severity"),
    [
        (0, 0, 2 * GIB, "ok"),
        (0, 0, GIB // 2, "warning"),
        (None, None, 2 * GIB, "warning"),
        (10 * GIB, 3, 9 * GIB, "problem"),
        (10 * GIB, 3, 29 * GIB, "warning"),
        (10 * GIB, 3, 31 * GIB, "ok"),
        (10 * GIB, None, 19 * GIB, "warning"),
    ],
)
def test_the_disk_holds_as_many_checkpoints_as_are_kept(
    checkpoint: int | None, kept: int | None, free: int, severity: str
) -> None:
    facts = DiskFacts("sluice.run_dir", "runs", True, free, checkpoint, kept)
    only(disk_findings(facts), severity)


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    facts = DiskFacts("sluice.run_dir", "runs", False, 100 * GIB, 0, 0)
    assert "cannot be written" in only(disk_findings(facts), "problem").what


def test_a_checkpoint_holds_weights_and_two_moments(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = f"actor_rollout_ref.model.path={tmp_path}"
    saved = run_of(model, "trainer.save_freq=5")
    assert saved.shape is not None
    parameters = saved.shape.total_parameters
    assert checkpoint_bytes(saved.config, saved.shape) == 12 * parameters
    assert checkpoint_bytes(run_of(model).config, saved.shape) == 0
    halves = run_of("trainer.save_freq=5", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    assert checkpoint_bytes(halves.config, saved.shape) == 6 * parameters
    assert checkpoint_bytes(halves.config, None) is None


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ((), None),
        (("trainer.total_training_steps=20",), 4),
        (("trainer.max_actor_ckpt_to_keep=2",), 3),
        (("trainer.total_training_steps=5", "trainer.max_actor_ckpt_to_keep=2"), 1),
    ],
)
def test_one_checkpoint_more_than_are_kept_is_there_for_a_moment(
    settings: tuple[str, ...], kept: int | None
) -> None:
    assert checkpoints_kept(run_of("trainer.save_freq=5", *settings).config) == kept


def test_the_nearest_folder_that_is_there_stands_for_one_that_is_not(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(
    ("available", "severity"),
    [(None, "ok"), (3 * GIB, "ok"), (2 * GIB, "warning"), (GIB, "problem")],
)
def test_memory_is_compared_with_the_sum_of_all_processes(
    available: int | None, severity: str
) -> None:
    parts = (MemoryPart("trainer", GIB, 2 * GIB), MemoryPart("replicas", GIB / 2, GIB))
    only(memory_findings(MemoryFacts(available, parts)), severity)


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "key"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
)
def test_files_that_a_container_has_cached_count_as_free(
    tmp_path: Path, limit: str, used: str, statistics: str, key: str
) -> None:
    files = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {32 * GIB // 1024} kB\n",
        f"sys/fs/cgroup/{limit}": f"{8 * GIB}\n",
        f"sys/fs/cgroup/{used}": f"{7 * GIB}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert available_bytes(tmp_path) == GIB
    reported = f"anon {2 * GIB}\nactive_file 4096\n{key} {5 * GIB}\n"
    (tmp_path / "sys/fs/cgroup" / statistics).write_text(reported, encoding="ascii")
    assert available_bytes(tmp_path) == 6 * GIB


def test_without_a_containers_limit_the_kernels_estimate_holds(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n", encoding="ascii")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n", encoding="ascii")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("4096\n", encoding="ascii")
    assert available_bytes(tmp_path) == MIB
    assert available_bytes(tmp_path / "elsewhere") is None


def test_more_replicas_need_more_memory(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = f"actor_rollout_ref.model.path={tmp_path}"
    sizes = []
    for replicas in (1, 3):
        examined = run_of(model, f"sluice.rollout.replicas={replicas}")
        assert examined.shape is not None
        sizes.append(needed(examined, examined.shape))
    (trainer, one, _), (same, three, _) = sizes
    assert (three.at_least, three.at_most) == (3 * one.at_least, 3 * one.at_most)
    assert trainer == same
    assert all(0 < part.at_least <= part.at_most for part in (trainer, one, three))
    assert available_bytes()


@pytest.mark.parametrize(("cpus", "severity"), [(2.0, "ok"), (1.0, "warning"), (1.5, "warning")])
def test_threads_may_share_a_cpu_by_twos(cpus: float, severity: str) -> None:
    only(thread_findings(ThreadFacts(cpus, trainer=1, replicas=2, scorers=1)), severity)


def test_this_machine_has_cpus() -> None:
    assert 0 < available_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("seconds", "uses_tls", "severity"),
    [(1.0, True, "ok"), (-5.0, True, "warning"), (90.0, False, "warning"), (90.0, True, "problem")],
)
def test_a_skew_matters_by_its_size_and_more_with_certificates(
    seconds: float, uses_tls: bool, severity: str
) -> None:
    skews = (Skew("files", seconds),)
    found = clock_findings(ClockFacts(True, skews, has_remote_peers=True, uses_tls=uses_tls))
    only(found, severity)


@pytest.mark.parametrize(
    ("kept", "remote", "severity"),
    [(False, True, "warning"), (False, False, "ok"), (None, True, "ok"), (True, True, "ok")],
)
def test_a_clock_that_nobody_keeps_matters_with_peers_elsewhere(
    kept: bool | None, remote: bool, severity: str
) -> None:
    only(clock_findings(ClockFacts(kept, (), remote, uses_tls=False)), severity)


def test_the_clock_of_this_machine_is_no_problem() -> None:
    assert "problem" not in severities(check_clock(run_of()))


def test_a_file_servers_clock_is_read_from_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n", encoding="utf-8")
    before = set(tmp_path.iterdir())
    assert mount_kind(tmp_path, mounts) == "nfs4"
    skew = folder_skew(tmp_path / "run", mounts)
    assert skew is not None
    assert abs(skew.seconds) < 5
    assert set(tmp_path.iterdir()) == before
    mounts.write_text("disk / ext4 rw 0 0\n", encoding="utf-8")
    assert folder_skew(tmp_path, mounts) is None


def test_a_folder_that_is_a_link_is_where_it_leads(tmp_path: Path) -> None:
    shared, link, mounts = tmp_path / "shared", tmp_path / "runs", tmp_path / "mounts"
    (shared / "run").mkdir(parents=True)
    link.symlink_to(shared)
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/x {shared} nfs4 rw 0 0\n", encoding="utf-8")
    assert mount_kind(link / "run", mounts) == "nfs4"
    assert mount_kind(tmp_path, mounts) == "ext4"


class Dated(BaseHTTPRequestHandler):
    """Says that it is 2030."""

    def do_GET(self) -> None:
        self.send_response_only(404)
        self.send_header("Date", "Tue, 01 Jan 2030 00:00:00 GMT")
        self.end_headers()


@pytest.fixture
def dated_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Dated) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


def test_a_servers_clock_is_the_date_of_its_answer(dated_server: str) -> None:
    skew = http_skew(dated_server)
    assert skew is not None
    expected = datetime(2030, 1, 1, tzinfo=UTC).timestamp() - datetime.now(UTC).timestamp()
    assert abs(skew.seconds - expected) < 60
    assert http_skew("ftp://127.0.0.1/") is None


class Strange(StreamRequestHandler):
    """Answers, and not in HTTP."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"220 mail.example ESMTP\r\n")


@pytest.fixture
def strange_server() -> Iterator[str]:
    with TCPServer(("127.0.0.1", 0), Strange) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("address", ["", "http://[::1/v1", "http://127.0.0.1:port/v1"])
def test_a_reward_model_that_speaks_no_http_is_a_warning(strange_server: str, address: str) -> None:
    asked = address or strange_server
    run = run_of("reward.reward_model.enable=true", f"reward.reward_model.base_url='{asked}'")
    (reported, *_) = check_clock(run)
    assert only([reported], "warning").what.startswith(
        f"the reward model's clock cannot be asked for: {asked}"
    )
