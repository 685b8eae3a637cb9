"""Where a run's services listen, from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice.config.endpoints import peer_address
from sluice.config.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.rpc.credentials import Credentials, client_credentials

CONFIG_NAME = "config.yaml"


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Addresses (host:port) of a run's services, its folder and its configuration."""

    trainer: str
    reward: str
    run_dir: Path
    config: RunConfig

    @property
    def credentials(self) -> Credentials:
        """What the run's services are shown; read only here, since one that has ended needs none.

        Raises:
            ConfigError: they cannot be used here.
        """
        return client_credentials(self.config.sluice.security)


def locate_run(run: Path) -> RunLocation:
    """Finds a run that was started on this machine.

    Args:
        run: the run's folder, or its configuration file.

    Raises:
        ConfigError: nothing was started from there.
    """
    file = run / CONFIG_NAME if run.is_dir() else run
    if not file.is_file():
        raise ConfigError(
            f"run: {run} holds no {CONFIG_NAME}; give the folder of a started run "
            "(its sluice.run_dir), for example runs/quickstart"
        )
    config = load_config(file, ())
    return RunLocation(
        peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint"),
        peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint"),
        file.parent,
        config,
    )
