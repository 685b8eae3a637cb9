"""The addresses of a run's services, found by its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.client.run_address import locate_run
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError


def started(folder: Path, *overrides: str) -> Path:
    write_config(load_config(None, overrides), folder / "config.yaml")
    return folder


PORTS = ("sluice.trainer.endpoint.port=7001", "sluice.reward.endpoint.port=7002")


@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_a_run_is_found_by_its_folder_or_its_configuration(tmp_path: Path, name: str) -> None:
    location = locate_run(started(tmp_path, *PORTS) / name)
    assert (location.trainer, location.reward) == ("127.0.0.1:7001", "127.0.0.1:7002")
    assert location.run_dir == tmp_path


def test_an_advertised_address_is_used(tmp_path: Path) -> None:
    run = started(tmp_path, *PORTS, "sluice.trainer.endpoint.advertise=trainer.example:9")
    assert locate_run(run).trainer == "trainer.example:9"


def test_a_folder_without_a_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml; give the folder"):
        locate_run(tmp_path)


def test_a_configuration_without_ports_was_not_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sluice\.trainer\.endpoint: neither advertise nor port"):
        locate_run(started(tmp_path))
