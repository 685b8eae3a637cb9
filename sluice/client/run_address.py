"""The addresses of a run's services, and the credentials for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from sluice.config.addresses import peer_address
from sluice.config.derived import message_mb
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.config.schema.service import SecurityConfig
from sluice.errors import ConfigError
from sluice.rpc.credentials import FILE_VARIABLES, OPEN, Credentials, client_credentials
from sluice.service_contract import CONFIG_NAME


@dataclass(frozen=True, slots=True)
class RunAddress:
    """The services of a run as a client reaches them. Each address is host:port.

    Args:
        trainer: knows the fleet; None: ask the reward service or `replicas` instead.
        reward: takes prompts, grades, and knows the announced replicas.
        replicas: generate on these alone; empty: on all that serve.
        credentials: for all services.
        max_message_bytes: largest message either way.
    """

    trainer: str | None = None
    reward: str | None = None
    replicas: tuple[str, ...] = ()
    credentials: Credentials = OPEN
    max_message_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class RunLocation:
    """A run of this machine: its folder, its configuration, and host:port of its services."""

    run_dir: Path
    config: RunConfig
    trainer: str
    reward: str

    @property
    def credentials(self) -> Credentials:
        """Return the run's credentials. A run that has ended needs none, so they are read here.

        Raises:
            ConfigError: they cannot be used here.
        """
        return client_credentials(self.config.sluice.security)


def locate_run(run: Path) -> RunLocation:
    """Read the configuration of a run, which may have ended since.

    Args:
        run: the run's folder (`sluice.run_dir`), or its configuration file.

    Raises:
        ConfigError: nothing was started from there.
    """
    file = run / CONFIG_NAME if run.is_dir() else run
    refuse_missing(run)
    if not file.is_file():
        raise ConfigError(
            f"run: {run} holds no {CONFIG_NAME}; give the folder of a started run "
            "(its sluice.run_dir); one whose model or data are still being made has none yet"
        )
    config = load_config(file, ())
    return RunLocation(
        file.parent,
        config,
        peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint"),
        peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint"),
    )


def refuse_missing(run: Path) -> None:
    """Raise ConfigError if a run's folder does not exist; it names those that are called alike."""
    if run.exists():
        return
    started = [path.parent.name for path in run.parent.glob(f"*/{CONFIG_NAME}")]
    similar = [str(run.parent / name) for name in get_close_matches(run.name, started)]
    advice = f"did you mean {' or '.join(similar)}?" if similar else "give a run's sluice.run_dir"
    raise ConfigError(f"run: {run} does not exist; {advice}")


def run_started_from(file: Path) -> Path:
    """Return the folder of the run that a configuration of the user's has started.

    A file that names the trainer's address, such as a run's own, is returned as it is.

    Raises:
        ConfigError: nothing was started from there.
    """
    service = load_config(file, ()).sluice
    folder, trainer = Path(service.run_dir), service.trainer.endpoint
    if trainer.port or trainer.advertise:
        return file
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(
            f"run: {file} is a configuration, and its sluice.run_dir = {folder} holds no started "
            f"run; start it with `sluice up {file}`, or give the folder of a run"
        )
    return folder


def address_of_run(run: Path) -> RunAddress:
    """Read the addresses of a run from its folder; the ``SLUICE_`` variables come before it.

    Args:
        run: the run's folder (`sluice.run_dir`), or its configuration file.

    Raises:
        ConfigError: nothing was started from there, or the credentials cannot be used.
    """
    started = locate_run(run)
    return RunAddress(
        started.trainer,
        started.reward,
        credentials=started.credentials,
        max_message_bytes=message_mb(started.config) << 20,
    )


def credentials_from_environment() -> Credentials:
    """Return the credentials of the ``SLUICE_`` variables, for a client without a configuration.

    ``SLUICE_CA_FILE`` switches TLS on; the caller's certificate is used if it is set too.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    tls = SecurityConfig()
    if FILE_VARIABLES["ca_file"] in os.environ:
        has_own = FILE_VARIABLES["cert_file"] in os.environ
        tls = SecurityConfig(tls="mtls" if has_own else "server")
    return client_credentials(tls)
