"""Findings about devices, limits, memory and disk, from facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.config.memory.rollout import rollout_layout, rollout_memory
from sluice.config.memory.shape import image_encoder, published_encoder
from sluice.device.ascend_checks import AscendDemand, AscendHost
from sluice.device.host import available_bytes
from sluice.doctor import machine
from sluice.doctor.files import check_disk, checkpoint_bytes, checkpoints_kept, disk_finding
from sluice.doctor.finding import GIB, MIB, Finding
from sluice.doctor.machine import (
    BARE_ON_DEVICE_BYTES,
    check_npus,
    memory_finding,
    needed_memory,
    npu_findings,
)
from tests.support.doctor_findings import only, run_of, severities, write_model


def npus(*, wanted: int, files: int = 0, package: str | None = None) -> list[Finding]:
    host = AscendHost({"ASCEND_HOME_PATH": "/cann"}, "2.9.0", package, files)
    demand = AscendDemand(wanted, collectives_on_device=False)
    return list(npu_findings(host, demand, has_package=package is not None))


def test_no_npu_is_fine_where_none_is_asked_for() -> None:
    only(npus(wanted=0), "ok")


def test_what_an_npu_process_would_refuse_is_a_problem() -> None:
    assert severities(npus(wanted=1)) == ["problem", "problem"]
    only(npus(wanted=2, files=2, package="2.9.0"), "ok")


def test_a_package_without_devices_is_a_warning_where_no_npu_is_asked_for() -> None:
    assert set(severities(npus(wanted=0, package="2.9.0"))) == {"warning"}


def test_a_run_that_asks_for_npus_is_reported_what_this_machine_lacks() -> None:
    found = list(check_npus(run_of("trainer.device=npu", "sluice.rollout.device=npu")))
    assert "problem" in severities(found)
    assert any("torch_npu is not installed" in one.what for one in found)


def test_a_run_with_vllm_on_npus_is_reported_that_its_plugin_is_missing() -> None:
    engine = "actor_rollout_ref.rollout.name=vllm"
    with_vllm = list(check_npus(run_of(engine, "trainer.device=cpu", "sluice.rollout.device=npu")))
    assert any("vllm_ascend is not installed" in one.what for one in with_vllm)
    trained = list(check_npus(run_of(engine, "trainer.device=npu", "sluice.rollout.device=cpu")))
    assert not any("vllm_ascend" in one.what for one in trained)


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
    only([disk_finding("sluice.run_dir", "runs", free, checkpoint, kept)], severity)


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    found, _ = check_disk(run_of())
    assert found.severity == "problem"
    assert "cannot be written" in found.what


def test_a_checkpoint_holds_what_is_trained_and_two_moments(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = f"actor_rollout_ref.model.path={tmp_path}"
    saved = run_of(model, "trainer.save_freq=5")
    assert saved.shape is not None
    parameters = saved.shape.total_parameters
    assert checkpoint_bytes(saved.config, saved.shape) == 12 * parameters
    halves = run_of("trainer.save_freq=5", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    assert checkpoint_bytes(halves.config, saved.shape) == 6 * parameters
    assert checkpoint_bytes(halves.config, None) is None
    adapted = run_of("trainer.save_freq=5", "actor_rollout_ref.model.lora_rank=8").config
    adapters = 12 * saved.shape.adapter_parameters(8, experts=True)
    assert checkpoint_bytes(adapted, saved.shape) == adapters < 12 * parameters


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


@pytest.mark.parametrize(
    ("available", "severity"),
    [(None, "ok"), (3 * GIB, "ok"), (2 * GIB, "warning")],
)
def test_memory_is_compared_with_the_sum_of_all_processes(
    available: int | None, severity: str
) -> None:
    parts = {"trainer": 2 * GIB, "replicas": GIB}
    only([memory_finding(available, parts)], severity)


def test_files_that_a_container_has_cached_count_as_free(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {32 * GIB // 1024} kB\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{7 * GIB}\n",
    }
    reported = f"anon {2 * GIB}\nactive_file 4096\ninactive_file {5 * GIB}\n"
    files["sys/fs/cgroup/memory.stat"] = reported
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
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
        sizes.append(list(needed_memory(examined, examined.shape).values()))
    (trainer, one, _), (same, three, _) = sizes
    assert three == 3 * one
    assert trainer == same
    assert trainer > 0
    assert available_bytes()


def test_kept_prefixes_of_the_torch_engine_take_as_much_as_its_slots(tmp_path: Path) -> None:
    write_model(tmp_path)
    most = []
    for keeps in ("false", "true"):
        examined = run_of(
            f"actor_rollout_ref.model.path={tmp_path}",
            "actor_rollout_ref.rollout.name=torch",
            "sluice.rollout.device=cpu",
            "sluice.rollout.replicas=1",
            f"actor_rollout_ref.rollout.enable_prefix_caching={keeps}",
        )
        assert examined.shape is not None
        memory = rollout_memory(examined.shape, rollout_layout(examined.config), None)
        most.append(needed_memory(examined, examined.shape)["1 replica(s)"])
    assert most[1] - most[0] == memory.kv_of_all_sequences


@pytest.mark.parametrize(
    ("overrides", "held", "whole"),
    [
        ([], 0.0, 2 * 4.0),
        (["trainer.n_gpus_per_node=1"], 0.0, 4.0),  # a checkpoint gathers no moments
        (["actor_rollout_ref.actor.use_kl_loss=true"], 4.0, 2 * 4.0),  # a reference, in shards
        (["trainer.n_gpus_per_node=4"], 0.0, 4 * 4.0),  # each rank may read the whole model
    ],
)
def test_the_host_holds_what_ranks_read_and_what_devices_receive(
    overrides: list[str],
    held: float,
    whole: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_model(tmp_path)
    on_gpus = ("trainer.device=cuda", "sluice.rollout.device=cuda", "trainer.n_gpus_per_node=2")
    wire = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=bfloat16")
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    model, one = f"actor_rollout_ref.model.path={tmp_path}", "sluice.rollout.replicas=1"
    examined = run_of(model, *on_gpus, *wire, tp, one, *overrides)
    assert examined.shape is not None
    parameters, ranks = examined.shape.total_parameters, examined.config.trainer.n_gpus_per_node
    monkeypatch.setattr(machine, "rank_bytes_on_host", lambda *_: 0.0)
    trainer, replicas, _ = needed_memory(examined, examined.shape).values()
    on_host = trainer - ranks * BARE_ON_DEVICE_BYTES
    # Two snapshots in bfloat16 beside it.
    assert on_host == parameters * (held + whole + 2 * 2)
    # Each of two devices holds the base of the next update and the update.
    assert replicas - BARE_ON_DEVICE_BYTES == parameters * 2 * 2 * 2


def test_offloaded_moments_and_asynchronous_saves_stay_on_the_host_with_the_ranks_shards(
    tmp_path: Path,
) -> None:
    write_model(tmp_path)
    actor = "actor_rollout_ref.actor"

    def held(*overrides: str) -> float:
        found = run_of(
            f"actor_rollout_ref.model.path={tmp_path}", "trainer.n_gpus_per_node=2", *overrides
        )
        assert found.shape is not None
        return machine.rank_bytes_on_host(found.config, found.shape) / found.shape.total_parameters

    nothing = held()
    away = held(f"{actor}.fsdp_config.optimizer_offload=true")
    assert away - nothing == pytest.approx(8 / 2)
    saving = held(f"{actor}.checkpoint.async_save=true")
    assert saving - nothing == pytest.approx(12 / 2)
    gae = "algorithm.adv_estimator=gae"
    critic = held(gae, "critic.fsdp.param_offload=true", "critic.fsdp.optimizer_offload=true")
    assert critic - held(gae) == pytest.approx(12 / 2)


def test_the_pixels_of_a_batch_and_an_image_encoder_count_on_the_host(tmp_path: Path) -> None:
    write_model(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text(encoding="utf-8")
    vision = dict(published_encoder("Qwen3-VL-30B-A3B"))
    encoder = image_encoder(vision)
    assert encoder is not None
    content = json.dumps({**json.loads(text), "vision_config": vision})

    def held(content: str, *overrides: str) -> float:
        file.write_text(content, encoding="utf-8")
        found = run_of(f"actor_rollout_ref.model.path={tmp_path}", *overrides)
        assert found.shape is not None
        return machine.rank_bytes_on_host(found.config, found.shape)

    data = run_of().config.data
    pixels = data.train_batch_size * data.max_prompt_length * encoder.pixel_bytes
    assert held(content) - held(text) == pixels
    away = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    assert held(content, away) - held(text, away) == pixels + 8 * encoder.parameters
