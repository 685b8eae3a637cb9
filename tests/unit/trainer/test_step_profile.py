"""Traces of training steps by torch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest
from torch.profiler import profile

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.step_measures import StepProfiler
from sluice.config.explain import notices
from sluice.config.loading.loader import load_config, settings_of
from sluice.config.rules.checks import relation_problems
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from tests.support.tiny_policy import make_batch, make_config, save_model

OWN = "actor_rollout_ref.actor.profiler"
ON = ("global_profiler.tool=torch", "global_profiler.steps=[2]", f"{OWN}.enable=true")


def profiled(folder: Path, *overrides: str) -> RunConfig:
    path = f"global_profiler.save_path={folder}"
    return load_config(None, [*ON, f"{OWN}.ranks=[0,2]", path, *overrides])


def traced(config: RunConfig, *, rank: int = 0, step: int = 2) -> dict[str, float]:
    with StepProfiler(config, rank, "cpu").tracing(step) as times:
        pass
    return times


def test_a_step_of_the_list_leaves_a_trace_of_its_update_and_two_times(tmp_path: Path) -> None:
    config, traces = make_config(save_model(tmp_path / "model")), tmp_path / "traces"
    asked = profiled(traces)
    actor = msgspec.structs.replace(
        config.actor_rollout_ref.actor, profiler=asked.actor_rollout_ref.actor.profiler
    )
    config = msgspec.structs.replace(
        config,
        global_profiler=asked.global_profiler,
        actor_rollout_ref=msgspec.structs.replace(config.actor_rollout_ref, actor=actor),
    )
    learner = Learner(config, ParallelContext(), total_steps=10)
    timed = [
        {name for name in learner.train_step(make_batch(), step) if name.endswith("_profile")}
        for step in (1, 2, 3)
    ]
    assert timed == [set(), {"timing_s/start_profile", "timing_s/stop_profile"}, set()]
    (trace,) = traces.iterdir()
    assert trace.name == "step-2-rank-0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(str(event.get("name", "")).endswith("MmBackward0") for event in events)


@pytest.mark.parametrize(
    ("overrides", "rank", "step", "is_traced"),
    [
        ((), 0, 2, True),
        ((), 1, 2, False),
        ((), 2, 2, True),
        ((f"{OWN}.all_ranks=true",), 1, 2, True),
        ((), 0, 1, False),
        ((f"{OWN}.enable=false",), 0, 2, False),
        (("global_profiler.steps=null",), 0, 2, False),
        (("global_profiler.tool=null",), 0, 2, False),
        (("global_profiler.tool=null", f"{OWN}.tool=torch"), 0, 2, True),
        ((f"{OWN}.tool=nsys",), 0, 2, False),
    ],
)
def test_ranks_and_steps_are_traced_as_the_keys_say(
    tmp_path: Path, overrides: tuple[str, ...], rank: int, step: int, *, is_traced: bool
) -> None:
    found = traced(profiled(tmp_path, *overrides), rank=rank, step=step)
    assert bool(found) == is_traced
    assert [one.name for one in tmp_path.iterdir()] == (
        [f"step-{step}-rank-{rank}.json.gz"] if is_traced else []
    )


def test_the_trainers_own_folder_comes_before_the_global_one(tmp_path: Path) -> None:
    traced(profiled(tmp_path / "global", f"{OWN}.save_path={tmp_path / 'own'}"))
    assert [one.name for one in tmp_path.iterdir()] == ["own"]


def test_a_folder_that_cannot_be_made_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"global_profiler\.save_path = .*traces: the folder"):
        StepProfiler(profiled(tmp_path / "file" / "traces"), 0, "cpu")


def test_a_step_that_fails_leaves_no_trace_and_the_next_one_can_be_traced(tmp_path: Path) -> None:
    profiler = StepProfiler(profiled(tmp_path, "global_profiler.steps=[2,3]"), 0, "cpu")
    with pytest.raises(ZeroDivisionError), profiler.tracing(2):
        _ = 1 / 0
    with profiler.tracing(3):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["step-3-rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(profiled(tmp_path / "gone"), 0, "cpu")
    (tmp_path / "gone").rmdir()
    with profiler.tracing(2):
        pass
    assert "no trace of step 2" in caplog.text


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_profiler_that_fails_is_one_warning_and_the_step_counts(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = profile.stop

    def fail(profiler: profile) -> None:
        if method == "stop":  # another test's profiler can start afterwards
            stop(profiler)
        raise RuntimeError("the driver has no tracer")

    monkeypatch.setattr(f"torch.profiler.profile.{method}", fail)
    traced(profiled(tmp_path))
    (warned,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert warned.endswith("the profiler failed: the driver has no tracer")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ((), False),
        ((f"{OWN}.ranks=[]",), True),
        ((f"{OWN}.ranks=[1]",), True),
        ((f"{OWN}.ranks=[1]", "trainer.n_gpus_per_node=2"), False),
        ((f"{OWN}.ranks=[]", f"{OWN}.all_ranks=true"), False),
        ((f"{OWN}.ranks=[]", f"{OWN}.enable=false"), False),
        ((f"{OWN}.ranks=[]", "global_profiler.steps=null"), False),
    ],
)
def test_steps_that_no_rank_would_trace_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], *, is_refused: bool
) -> None:
    found = [one for one in relation_problems(profiled(tmp_path, *overrides)) if OWN in one.key]
    assert bool(found) == is_refused
    assert all("set ranks=[0], or all_ranks=true" in one.text for one in found)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("global_profiler.tool=nsys", "only torch's profiler is there"),
        (f"{OWN}.tool=npu", "only torch's profiler is there"),
        ("actor_rollout_ref.rollout.profiler.enable=true", "only the trainer is profiled"),
        ("critic.profiler.enable=true", "traces whole steps of a rank"),
        ("global_profiler.global_tool_config.nsys.discrete=true", "without shapes"),
    ],
)
def test_what_has_no_effect_on_the_profiler_is_named(override: str, words: str) -> None:
    (one,) = notices(settings_of({}, [override]))
    assert words in one.text
