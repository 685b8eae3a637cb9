"""The certificates that `sluice prepare --secure` leaves in the run's folder."""

from __future__ import annotations

import datetime
import errno
import sys
from pathlib import Path

import pytest

from sluice.cli.run.certificates import (
    CERTIFICATES,
    ensure_certificates,
    security_settings,
    write_certificates,
)
from sluice.config.loading.loader import load_config
from sluice.config.rules.security import server_problems
from sluice.errors import ConfigError
from sluice.launch.shared_run import RunEnding, SharedRun
from sluice.security.certificates import ends_of_validity
from sluice.security.development_ca import DevelopmentCa, was_issued_by
from tests.unit.cli.test_prepare_command import model_and_data, prepare

pytestmark = pytest.mark.usefixtures("tried_scorers")

FOR_CLIENTS = ("ca.pem", "client.pem", "client.key", "client.token")


def looked_after(folder: Path, *, run_is_active: bool) -> str:
    """What `sluice prepare` does to a folder; returns what it said."""
    said = list[str]()
    ensure_certificates(folder, said.append, run_is_active=run_is_active)
    return "\n".join(said)


def made(folder: Path, days: int | None = None) -> Path:
    """Certificates as the command makes them; those of services valid for `days`, if given."""
    looked_after(folder, run_is_active=False)
    if days is not None:
        authority = DevelopmentCa(365)
        pair = authority.service(("sluice",), days)
        (folder / "ca.pem").write_bytes(authority.ca.certificate)
        (folder / "service.pem").write_bytes(pair.certificate)
        (folder / "service.key").write_bytes(pair.key)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_authoritys_key_is_not_left_and_what_clients_need_is_the_owners(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    prepare("--secure", "--run-dir", run_dir, *model_and_data(tmp_path / "job"))
    folder = run_dir / CERTIFICATES
    assert not (folder / "ca.key").exists()
    assert set(FOR_CLIENTS) <= set(contents(folder))
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_the_authoritys_key_is_at_no_time_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, seen = Path.replace, set[str]()

    def look(file: Path, target: Path) -> Path:
        seen.update(each.name for each in file.parent.iterdir())
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", look)
    made(tmp_path / "certs")
    assert any(name.startswith("service.key") for name in seen)
    assert not [name for name in seen if name.startswith("ca.key")]


def test_the_first_time_prepare_says_where_the_files_of_clients_are(tmp_path: Path) -> None:
    reported = looked_after(tmp_path / "certs", run_is_active=False)
    assert str(tmp_path / "certs") in reported
    assert all(name in reported for name in FOR_CLIENTS)
    assert looked_after(tmp_path / "certs", run_is_active=True) == ""


@pytest.mark.parametrize("days", [-1, 0, 29])
def test_certificates_that_end_within_a_month_are_all_made_again(tmp_path: Path, days: int) -> None:
    folder = made(tmp_path / "certs", days)
    before = contents(folder)
    reported = looked_after(folder, run_is_active=False)
    after = contents(folder)
    assert set(after) == set(before)
    assert not [name for name in after if after[name] == before[name]]
    ends = ends_of_validity(after["service.pem"])[0]
    assert ends > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=300)
    assert "service.pem" in reported
    assert "client.token" in reported


def test_certificates_with_more_time_left_stay(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    write_certificates(folder, [], 31, replace=False, with_authority_key=False)
    before = contents(folder)
    assert looked_after(folder, run_is_active=False) == ""
    assert contents(folder) == before


def spoil(folder: Path, name: str, content: bytes | None) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("run_is_active", [True, False])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, None) for name in ("ca.pem", "service.pem", "service.key", "service.tokens")),
        *((name, b"no certificate") for name in ("ca.pem", "service.pem")),
    ],
)
def test_files_that_services_refuse_are_made_again_also_while_a_run_is_active(
    tmp_path: Path, name: str, content: bytes | None, run_is_active: bool
) -> None:
    folder = made(tmp_path / "certs")
    spoil(folder, name, content)
    reported = looked_after(folder, run_is_active=run_is_active)
    assert "made again" in reported
    assert name in reported
    assert_consistent(folder)


@pytest.mark.parametrize("name", ["client.key", "client.token"])
def test_clients_files_are_made_again_only_without_an_active_run(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "certs")
    spoil(folder, name, None)
    before = contents(folder)
    assert looked_after(folder, run_is_active=True) == ""
    assert contents(folder) == before
    assert "made again" in looked_after(folder, run_is_active=False)
    assert_consistent(folder)


@pytest.mark.parametrize("run_is_active", [True, False])
def test_files_of_the_users_own_are_never_replaced(tmp_path: Path, run_is_active: bool) -> None:
    folder = made(tmp_path / "certs", -1)
    (folder / "client.pem").unlink()
    before = contents(folder)
    assert "not replaced" in looked_after(folder, run_is_active=run_is_active)
    assert contents(folder) == before


def test_files_of_another_authority_than_ours_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.security.development_ca._AUTHORITY_NAME", "a company's CA")
    write_certificates(tmp_path / "certs", [], 5, replace=False)
    monkeypatch.undo()
    before = contents(tmp_path / "certs")
    assert "not replaced" in looked_after(tmp_path / "certs", run_is_active=False)
    assert contents(tmp_path / "certs") == before


@pytest.mark.parametrize("name", ["ca.pem", "service.pem", "client.pem"])
def test_a_file_system_that_fails_for_a_moment_has_nothing_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, read = made(tmp_path / "certs", -1), Path.read_bytes
    before = contents(folder)

    def fail(file: Path) -> bytes:
        if file.name == name:
            raise OSError(errno.ESTALE, "fails")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read .* nothing was replaced"):
        looked_after(folder, run_is_active=False)
    monkeypatch.undo()
    assert contents(folder) == before


@pytest.mark.parametrize("replaced", range(7))
@pytest.mark.parametrize("days", [None, -1, 365])
def test_a_process_that_was_killed_between_two_files_is_made_up_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replaced: int,
    days: int | None,
) -> None:
    folder, replace, left = tmp_path / "certs", Path.replace, [replaced]
    if days is not None:
        spoil(made(folder, days), "client.pem", b"no certificate")

    def killed(file: Path, target: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        looked_after(folder, run_is_active=False)
    monkeypatch.undo()
    looked_after(folder, run_is_active=False)
    assert_consistent(folder)


def assert_consistent(folder: Path) -> None:
    """Services take the files, and each other, and the clients."""
    security = load_config(None, security_settings(folder)).sluice.security
    assert server_problems(security, "trainer") == []
    found = contents(folder)
    assert was_issued_by(found["client.pem"], found["ca.pem"])
    assert found["client.token"] in found["service.tokens"]


def test_without_the_package_that_reads_certificates_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "certs", 5)
    before = contents(folder)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="need the package cryptography"):
        looked_after(folder, run_is_active=False)
    assert contents(folder) == before


def test_an_active_run_keeps_its_certificates_and_the_next_one_gets_others(tmp_path: Path) -> None:
    run_dir, job = tmp_path / "run", model_and_data(tmp_path / "job")
    prepare("--secure", "--run-dir", run_dir, *job)
    folder = made(run_dir / CERTIFICATES, 5)
    before = contents(folder)
    assert "the run continues" in prepare("--secure", "--run-dir", run_dir, *job)
    assert contents(folder) == before
    SharedRun(run_dir).end(RunEnding("trainer", ()))
    assert "made again" in prepare("--secure", "--run-dir", run_dir, *job)
    assert contents(folder) != before


def test_an_interrupted_run_with_expired_certificates_continues_with_new_ones(
    tmp_path: Path,
) -> None:
    run_dir, job = tmp_path / "run", model_and_data(tmp_path / "job")
    prepare("--secure", "--run-dir", run_dir, *job)
    made(run_dir / CERTIFICATES, -1)
    reported = prepare("--secure", "--run-dir", run_dir, *job)
    assert "made again" in reported
    assert "the run continues" in reported


def test_a_restarted_run_gets_new_certificates(tmp_path: Path) -> None:
    run_dir, job = tmp_path / "run", model_and_data(tmp_path / "job")
    prepare("--secure", "--run-dir", run_dir, *job)
    made(run_dir / CERTIFICATES, 5)
    assert "made again" in prepare("--secure", "--restart", "--run-dir", run_dir, *job)


def test_the_settings_name_files_that_are_made(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    security = load_config(None, security_settings(folder)).sluice.security
    for file in (security.ca_file, security.cert_file, security.key_file, security.token_file):
        assert file is not None
        assert Path(file).is_file()
