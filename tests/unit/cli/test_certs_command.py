"""`sluice certs`: its files let services reach each other, and clients reach them."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.loading.loader import load_config
from sluice.config.rules.security import client_problems, exposed_secrets, server_problems
from sluice.config.schema.service import SecurityConfig
from sluice.errors import ConfigError
from sluice.rpc.credentials import client_credentials
from sluice.security.token_file import Role

FILES = {
    *("ca.pem", "ca.key", "service.pem", "service.key", "client.pem", "client.key"),
    *("service.tokens", "client.token"),
}


def certs(out: Path, *arguments: str) -> str:
    result = CliRunner().invoke(
        commands, ["certs", "--out", str(out), *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def printed(text: str, tmp_path: Path) -> SecurityConfig:
    """The configuration that was printed, read as a run would."""
    block = text[text.index("sluice:\n") : text.index("for clients")]
    assert set(yaml.safe_load(block)) == {"sluice"}
    (tmp_path / "run.yaml").write_text(block)
    return load_config(tmp_path / "run.yaml", ()).sluice.security


def variables(text: str) -> dict[str, str]:
    lines = [line.removeprefix("export ") for line in text.splitlines() if "export " in line]
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("made") / "certs"
    return out, certs(out)


def test_all_files_are_the_owners_alone(made: tuple[Path, str]) -> None:
    found = {file.name: stat.S_IMODE(file.stat().st_mode) for file in made[0].iterdir()}
    assert found == dict.fromkeys(FILES, 0o600)


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7", "10.0.0.9"])
def test_the_printed_configuration_serves_at_every_address(
    host: str, made: tuple[Path, str], tmp_path: Path
) -> None:
    security = printed(made[1], tmp_path)
    assert server_problems(security, host) == []
    assert list(exposed_secrets(security)) == []


def test_the_printed_variables_make_a_client_that_is_no_service(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    security = printed(made[1], tmp_path)
    found = client_credentials(security, variables(made[1]))
    assert found.certificate == (made[0] / "client.pem").read_bytes()
    assert found.tokens is not None
    (own,) = found.tokens.tokens()
    accepted = client_credentials(security, {}).tokens
    assert accepted is not None
    assert [(t.role, t.secret == own.secret) for t in accepted.tokens()] == [
        (Role.SERVICE, False),
        (Role.CLIENT, True),
    ]
    assert client_problems(security) == []


def test_the_printed_lines_are_read_by_a_shell_as_they_are_meant(tmp_path: Path) -> None:
    out = tmp_path / "my certs; $(true)"
    script = "\n".join(line for line in certs(out).splitlines() if line.startswith("export "))
    shown = subprocess.run(
        ["sh", "-c", f'{script}\nprintf %s "$SLUICE_TOKEN_FILE"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == str(out / "client.token")


def test_no_secret_is_printed(made: tuple[Path, str]) -> None:
    for name in ("service.tokens", "ca.key", "service.key"):
        for line in (made[0] / name).read_text().splitlines():
            assert line.split()[-1] not in made[1].replace("PRIVATE KEY-----", "")


def test_given_hosts_are_in_the_certificate_and_then_addresses_count(tmp_path: Path) -> None:
    text = certs(tmp_path / "c", "--host", "trainer.lab", "--host", "10.0.0.5", "--host", "fd00::1")
    security = printed(text, tmp_path)
    assert security.server_name is None
    for host in ("trainer.lab", "10.0.0.5", "fd00::1", "localhost"):
        assert server_problems(security, host) == []
    assert len(server_problems(security, "10.0.0.6")) == 1


def test_nothing_is_replaced_without_force(tmp_path: Path, made: tuple[Path, str]) -> None:
    certs(tmp_path / "c")
    before = {file: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    with pytest.raises(ConfigError, match=r"already, which a run may use; .* --force"):
        certs(tmp_path / "c")
    assert {file: file.read_bytes() for file in (tmp_path / "c").iterdir()} == before
    certs(tmp_path / "c", "--force")
    assert all(file.read_bytes() != content for file, content in before.items())


@pytest.mark.parametrize("host", ["trainer.lab:7001", "two words", "zürich", "[fd00::1]:1"])
def test_what_is_no_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a name or address; write it without a port"):
        certs(tmp_path / "c", "--host", host)
    assert not (tmp_path / "c").exists()


def test_without_the_package_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sluice.security.development_ca", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"need the package cryptography; pip install 'sluice\["):
        certs(tmp_path / "c")
