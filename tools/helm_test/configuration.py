"""The configuration that rendered objects give a run, read by sluice's own loader and rules."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import check_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.launch.network_layout import PREPARE, SERVICE_PORTS, network_settings

# What `sluice prepare` adds where it makes the quickstart's model and data.
_QUICKSTART = (
    "actor_rollout_ref.model.path=/runs/run/assets/model",
    "data.train_files=/runs/run/assets/train.parquet",
    "data.val_files=/runs/run/assets/test.parquet",
    "data.max_prompt_length=64",
    "data.max_response_length=256",
    "reward.reward_kwargs.overlong_buffer_cfg.len=64",
)


def prepare_words(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the words behind `sluice prepare` in the trainer's pod."""
    pods = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Job")
    containers = (one for pod in pods for one in pod.get("initContainers", ()))
    (words,) = (one["args"] for one in containers if one["name"] == "prepare")
    start = words.index(PREPARE[0])
    return [str(word) for word in words[start + len(PREPARE) :]]


def configuration_problems(
    documents: Iterable[Mapping[str, Any]], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what sluice refuses, and services whose ports are not those of the layout."""
    overrides = [word for word in prepare_words(documents) if "=" in word]
    try:
        config = _load(values.get("run", {}), overrides)
    except ConfigError as error:
        yield str(error)
        return
    for kind, place in SERVICE_PORTS.items():
        endpoint = getattr(config.sluice, kind).endpoint
        if (endpoint.port, endpoint.health_port) != (place.port, place.health_port):
            yield f"{kind}: found at {endpoint.port} and {endpoint.health_port}"
        if endpoint.metrics_port not in {None, place.metrics_port}:
            yield f"{kind}: scraped at {endpoint.metrics_port}"


def _load(run: Mapping[str, Any], overrides: list[str]) -> RunConfig:
    with ExitStack() as stack:
        if run.get("quickstart", True):
            job = stack.enter_context(as_file(files("sluice.quickstart") / "quickstart.yaml"))
            overrides = [*_QUICKSTART, *network_settings(), *overrides]
        else:
            job = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run.yaml"
            job.write_text(run["config"], encoding="utf-8")
            overrides = [*network_settings(), *overrides]
        config = load_config(job, overrides)
    check_config(config, files=False)
    return config
