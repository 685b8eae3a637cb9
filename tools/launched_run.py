"""A small run of `sluice up` in processes of its own, for the tools that use one.

Signals go to the ids that the launcher reports at that moment, so they hit only processes of the
run.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

from sluice.client.launcher import LaunchedProcess, Launcher
from sluice.client.run_address import locate_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.config.rules.checks import check_config
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from sluice.launch.service_spec import with_ports
from sluice.launch.servicer import launcher_of
from sluice.quickstart.prepare import prepare
from sluice.quickstart.settings import JARS_SETTINGS, PrepareSettings, WarmStartSettings
from tools.commands import started
from tools.phases import PhaseError

_T = TypeVar("_T")
LOOPBACK = "127.0.0.1"
SLUICE = (sys.executable, "-m", "sluice.cli.main")
_STOP_S, _END_S, _POLL_S, _ANSWER_S = 300.0, 150.0, 0.2, 10.0
# Files of overrides, and a reward function.
_SETTINGS = Path(__file__).with_name("run_settings")
# The quickstart's task and what is made for it. The model of `tiny` knows nothing; `stretch` is not
# solved within minutes. So groups stay mixed. `jars` plays with an environment.
SIZES = {
    "tiny": (
        "quickstart",
        PrepareSettings(
            num_train=4_000,
            num_held_out=16,
            num_tokenizer_dialogues=100,
            warm_start=WarmStartSettings(max_hold_steps=1, warmup_steps=1, decay_steps=1),
        ),
    ),
    "stretch": ("stretch", PrepareSettings()),
    "jars": ("jars", replace(JARS_SETTINGS, num_held_out=16)),
}


def settings_file(name: str) -> str:
    """Return the word for a file of overrides in run_settings."""
    return f"@{_SETTINGS / f'{name}.overrides'}"


SHORT_DEADLINES = settings_file("short_deadlines")


def prepare_run(
    folder: Path, size: str, overrides: Sequence[str], *, seed: int = 0, host: str = LOOPBACK
) -> tuple[RunConfig, Path]:
    """Make model and data, and write the configuration, with ports.

    Args:
        folder: gets ``assets``, ``run.yaml``, ``scorer.py``, and, from the run, ``run``.
        size: a key of `SIZES`; `tiny` scores by chance.
        overrides: settings above those of the size.
        seed: of model, data and sampling.
        host: where trainer and reward service listen.
    """
    task, made = SIZES[size]
    assets = prepare(
        folder / "assets", task=task, seed=seed, progress=lambda _: None, settings=made
    )
    scorer = folder / "scorer.py"
    shutil.copyfile(_SETTINGS / "chance_scorer.py", scorer)
    settings = [
        *(f"{key}.endpoint.host={host}" for key in ("sluice.trainer", "sluice.reward")),
        f"actor_rollout_ref.model.path={assets.model_dir.absolute()}",
        f"data.train_files={assets.train_file.absolute()}",
        f"data.val_files={assets.val_file.absolute()}",
        f"data.max_prompt_length={assets.task.max_prompt_tokens}",
        f"data.max_response_length={assets.task.max_response_tokens}",
        f"reward.reward_kwargs.overlong_buffer_cfg.len={assets.task.overlong_buffer_tokens}",
        *(f"{key}.seed={seed}" for key in ("data", "actor_rollout_ref.rollout", "trainer")),
        f"sluice.run_dir={(folder / 'run').absolute()}",
        *assets.task.overrides,
        settings_file("endless"),
        settings_file(size),
    ]
    if size == "tiny":
        settings.append(f"reward.custom_reward_function.path={scorer.absolute()}")
    with as_file(files("sluice.quickstart") / "quickstart.yaml") as base:
        config = load_config(base, [*settings, *overrides])
    check_config(config)
    config = with_ports(config)
    write_config(config, folder / "run.yaml")
    return config, folder / "run.yaml"


class LaunchedRun:
    """A run's processes.

    Args:
        run_dir: its folder.
        up: the process of `sluice up`.
    """

    def __init__(self, run_dir: Path, up: Popen[bytes]) -> None:
        self.run_dir, self.up = run_dir, up

    async def processes(self) -> dict[str, LaunchedProcess]:
        """Return those that run now, by name; nothing before the launcher serves."""
        with suppress(SluiceError):
            found = launcher_of(self.run_dir)
            async with Launcher(found.address, found.credentials) as launcher:
                return {one.name: one for one in await launcher.services() if one.pid}
        return {}

    def monitor(self) -> RunMonitor:
        """Return a client of trainer and reward service, as an async context manager.

        Raises:
            ConfigError: `sluice up` has not written the run's configuration yet.
        """
        found = locate_run(self.run_dir)
        return RunMonitor.of(found)

    async def snapshot(self) -> RunSnapshot | None:
        """Return the run's state; None while the trainer is away."""
        with suppress(SluiceError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S), self.monitor() as monitor:
                return await monitor.snapshot()
        return None

    async def until_training(self, step: int, replicas: int, within_s: float) -> RunSnapshot:
        """Return the state after so many steps with so many serving replicas.

        Raises:
            PhaseError: the run ended before, or not in time.
        """

        async def training() -> RunSnapshot | None:
            seen = await self.snapshot()
            serving = [one for one in seen.replicas if one.state == "serving"] if seen else []
            return seen if seen and seen.step >= step and len(serving) >= replicas else None

        return await self.until(f"step {step} with {replicas} replicas", training, within_s)

    async def until(
        self, what: str, holds: Callable[[], Awaitable[_T | None]], within_s: float
    ) -> _T:
        """Poll until `holds` returns something true; return it. Errors are `until_training`'s."""
        ends_s = time.monotonic() + within_s
        while not (found := await holds()):
            if (code := self.up.poll()) is not None:
                raise PhaseError(f"{what}: the run ended first with code {code}")
            if time.monotonic() > ends_s:
                raise PhaseError(f"{what}: not in time")
            await asyncio.sleep(_POLL_S)
        return found

    async def stop(self, reason: str) -> int:
        """End the run as at its last step; return the exit code of `sluice up`, -1 if it hangs."""
        ends_s, is_asked = time.monotonic() + _STOP_S, False
        while self.up.poll() is None and time.monotonic() < ends_s:
            if not is_asked:
                # A trainer that was killed before does not answer until it is started again.
                with suppress(SluiceError):
                    async with self.monitor() as monitor:
                        await monitor.stop(reason)
                        is_asked = True
            await asyncio.sleep(_POLL_S)
        code = self.up.poll()
        return -1 if code is None else code


@contextmanager
def launched_run(
    config: RunConfig,
    config_file: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[LaunchedRun]:
    """Start `sluice up` with options; end what is left of the run with the block.

    The output is in ``up.log`` beside the configuration.
    """
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "400", **(environment or {})}
    command = (*SLUICE, "up", str(config_file), *options)
    with started(command, config_file.parent / "up.log", quiet, ends_within_s=_END_S) as up:
        yield LaunchedRun(Path(config.sluice.run_dir), up)


@contextmanager
def training_run(
    size: str, overrides: Sequence[str], *, folder: Path | None = None, seed: int = 0
) -> Iterator[LaunchedRun]:
    """Prepare a run and let it train within the block, without a folder in a temporary one."""
    with tempfile.TemporaryDirectory(prefix="sluice-run-") as scratch:
        folder = folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        config, file = prepare_run(folder, size, overrides, seed=seed)
        with launched_run(config, file) as run:
            yield run
