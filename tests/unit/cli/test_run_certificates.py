"""The certificates that `sluice prepare --secure` leaves in the run's folder."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from sluice.cli import run_certificates
from sluice.cli.run_certificates import CERTIFICATES, ensure_certificates, security_settings
from sluice.config.loader import load_config
from sluice.launch.shared_run import Ending, SharedRun
from sluice.security.development_ca import DevelopmentCa, end_of_validity
from tests.unit.cli.test_prepare_command import model_and_data, prepare

FOR_CLIENTS = ("ca.pem", "client.pem", "client.key", "client.token")


def made(folder: Path, days: int | None = None) -> Path:
    """Certificates as the command makes them; those of services valid for `days`, if given."""
    ensure_certificates(folder, pytest.fail, run_goes_on=False)
    if days is not None:
        authority = DevelopmentCa(365)
        pair = authority.service(("sluice",), days)
        (folder / "ca.pem").write_bytes(authority.itself.certificate)
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


def test_an_authoritys_key_that_lies_there_is_taken_away(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    before = contents(folder)
    (folder / "ca.key").write_bytes(b"of an earlier run")
    ensure_certificates(folder, pytest.fail, run_goes_on=True)
    assert contents(folder) == before


def test_the_key_is_taken_away_also_where_signing_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "certs"
    folder.mkdir()

    def fail(*_: object, **__: object) -> None:
        (folder / "ca.key").write_bytes(b"key")
        raise OSError("disk full")

    monkeypatch.setattr(run_certificates, "write_certificates", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_certificates(folder, pytest.fail, run_goes_on=False)
    assert not (folder / "ca.key").exists()


@pytest.mark.parametrize("days", [-1, 0, 29])
def test_certificates_that_end_within_a_month_are_all_made_again(tmp_path: Path, days: int) -> None:
    folder, said = made(tmp_path / "certs", days), list[str]()
    before = contents(folder)
    ensure_certificates(folder, said.append, run_goes_on=False)
    after = contents(folder)
    assert set(after) == set(before)
    assert not [name for name in after if after[name] == before[name]]
    ends = end_of_validity(after["service.pem"])
    assert ends > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=300)
    (line,) = said
    assert "service.pem" in line
    assert "client.token" in line


def test_certificates_with_more_time_left_stay(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs", 31)
    before = contents(folder)
    ensure_certificates(folder, pytest.fail, run_goes_on=False)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["ca.pem", "service.pem", "client.pem"])
@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_what_cannot_be_read_is_made_again(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder, said = made(tmp_path / "certs"), list[str]()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    ensure_certificates(folder, said.append, run_goes_on=False)
    for each in ("ca.pem", "service.pem", "client.pem"):
        end_of_validity((folder / each).read_bytes())


def test_a_run_that_goes_on_keeps_its_certificates_and_prepare_says_so(tmp_path: Path) -> None:
    run_dir, job = tmp_path / "run", model_and_data(tmp_path / "job")
    prepare("--secure", "--run-dir", run_dir, *job)
    folder = made(run_dir / CERTIFICATES, 5)
    before = contents(folder)
    assert "not renewed while the run goes on" in prepare("--secure", "--run-dir", run_dir, *job)
    assert contents(folder) == before
    SharedRun(run_dir).end(Ending("trainer", ()))
    assert "made again" in prepare("--secure", "--run-dir", run_dir, *job)
    assert contents(folder) != before


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_an_interrupted_run_whose_certificates_have_ended_is_given_others_to_go_on_with(
    tmp_path: Path, content: bytes | None
) -> None:
    run_dir, job = tmp_path / "run", model_and_data(tmp_path / "job")
    prepare("--secure", "--run-dir", run_dir, *job)
    folder = made(run_dir / CERTIFICATES, -1)
    if content is not None:
        (folder / "service.pem").write_bytes(content)
    told = prepare("--secure", "--run-dir", run_dir, *job)
    assert "made again" in told
    assert "the run goes on" in told


def test_a_run_that_is_begun_anew_has_its_certificates_made_again(tmp_path: Path) -> None:
    run_dir, job = tmp_path / "run", model_and_data(tmp_path / "job")
    prepare("--secure", "--run-dir", run_dir, *job)
    made(run_dir / CERTIFICATES, 5)
    assert "made again" in prepare("--secure", "--anew", "--run-dir", run_dir, *job)


def test_the_settings_name_files_that_are_made(tmp_path: Path) -> None:
    folder = made(tmp_path / "certs")
    security = load_config(None, security_settings(folder)).sluice.security
    for file in (security.ca_file, security.cert_file, security.key_file, security.token_file):
        assert file is not None
        assert Path(file).is_file()
