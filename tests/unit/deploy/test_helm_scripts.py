"""The programs that the chart's pods run beside sluice's own: waiting, beginning, ending a run."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sluice.launch.shared_run import RunEnding, SharedRun
from tests.support.source_tree import ROOT

FILES = ROOT / "deploy" / "helm" / "sluice" / "files"


def program(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"chart_{name}", FILES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(name="wait")
def _wait(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = program("wait")
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    return module


def begun(folder: Path) -> SharedRun:
    run = SharedRun(folder)
    run.begin(folder / "checkpoints")
    return run


def test_a_service_waits_for_a_run_that_has_begun_and_not_ended(
    wait: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait.main(["run", str(tmp_path), "0.05"]) == 1
    assert "has not begun" in capsys.readouterr().err
    run = begun(tmp_path)
    assert wait.main(["run", str(tmp_path), "0.05"]) == 0
    run.end(RunEnding("trainer", ()))
    assert wait.main(["run", str(tmp_path), "0.05"]) == 1
    assert "has ended" in capsys.readouterr().err


def test_what_is_waited_for_may_come_late(wait: ModuleType, tmp_path: Path) -> None:
    later = threading.Timer(0.2, begun, [tmp_path])
    later.start()
    try:
        assert wait.main(["run", str(tmp_path), "30"]) == 0
    finally:
        later.join()


def test_a_port_counts_once_somebody_listens(
    wait: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody else is given the port meanwhile
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert wait.main(["port", address, "0.05"]) == 1
        server.listen()
        assert wait.main(["port", address, "60"]) == 0
    assert f"given up after 0.05 s: {address}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "found", "alone"),
    [
        ("10.0.0.7", ["10.0.0.7"], True),
        ("10.0.0.7,fd00::7", ["10.0.0.7"], True),
        ("10.0.0.7", ["10.0.0.6", "10.0.0.7"], False),
        ("10.0.0.7", ["10.0.0.6"], False),
        ("", ["10.0.0.6"], False),
        ("10.0.0.7", [], False),
    ],
)
def test_a_trainer_begins_once_its_name_leads_to_it_alone(
    wait: ModuleType, monkeypatch: pytest.MonkeyPatch, own: str, found: list[str], alone: bool
) -> None:
    def resolve(name: str, _: object) -> list[Any]:
        assert name == "sluice-trainer"
        if not found:
            raise socket.gaierror("unknown name")
        return [(socket.AF_INET, None, None, "", (address, 0)) for address in found]

    monkeypatch.setenv(wait.ADDRESSES_VARIABLE, own)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert wait.main(["alone", "sluice-trainer", "0.05"]) == (0 if alone else 1)


def prepare(folder: Path, uid: str, command: str) -> int:
    # As the pod runs it: the script's text, and the name that $0 gets.
    script = (FILES / "prepare.sh").read_text(encoding="utf-8")
    arguments = ["sh", "-c", script, "prepare.sh", str(folder), uid, "sh", "-c", command]
    return subprocess.run(arguments, check=False).returncode


def test_a_run_is_begun_once_for_each_job(tmp_path: Path) -> None:
    folder, record = tmp_path / "run", tmp_path / "record"
    noting = f"echo x >> {record}"
    assert [prepare(folder, uid, noting) for uid in ("a", "a", "b", "a")] == [0, 0, 0, 0]
    assert record.read_text(encoding="utf-8") == "x\nx\n"
    assert (folder / "reward").is_dir(), "where the ledger's own volume is mounted"


def test_a_beginning_that_failed_is_tried_again(tmp_path: Path) -> None:
    assert prepare(tmp_path, "a", "exit 3") == 3
    assert prepare(tmp_path, "a", f"touch {tmp_path}/begun") == 0
    assert (tmp_path / "begun").is_file()


class ApiServer(ThreadingHTTPServer):
    """Answers as the test says, and notes who asked what."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ParsedRequest)
        self.conditions: list[list[dict[str, str]] | None] = []
        self.refused: dict[str, int] = {}
        self.asked: list[tuple[str, str, str | None, object]] = []


class ParsedRequest(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        self._note(None)
        conditions = self.server.conditions.pop(0)
        if conditions is None:
            self._answer(404, {})
        else:
            self._answer(200, {"status": {"conditions": conditions}})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._note({**body, "type": self.headers["Content-Type"]})
        self._answer(self.server.refused.get(self.path.split("/")[-2], 200), {})

    def _note(self, body: object) -> None:
        token = self.headers["Authorization"]
        self.server.asked.append((self.command, self.path, token, body))

    def _answer(self, code: int, content: object) -> None:
        payload = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(name="api_server")
def _api_server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def end_run(server: ApiServer, account: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    module = program("end_of_run")
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    (account / "token").write_text("secret-1\n", encoding="utf-8")
    api = module.Api(f"http://127.0.0.1:{server.server_port}", account)
    words = ["training", "x-trainer-1", "deployments/x-rollout", "statefulsets/x-reward"]
    code = module.main(words, api)
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("over", ["Complete", "Failed"])
def test_the_others_are_scaled_to_none_once_the_trainers_job_is_over(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    no, yes = ({"type": over, "status": word} for word in ("False", "True"))
    api_server.conditions = [None, [], [no], [{"type": "Suspended", "status": "True"}], [yes]]
    assert end_run(api_server, tmp_path, monkeypatch) == 0
    job = "/apis/batch/v1/namespaces/training/jobs/x-trainer-1"
    apps = "/apis/apps/v1/namespaces/training"
    none = {"spec": {"replicas": 0}, "type": "application/merge-patch+json"}
    assert api_server.asked == [
        *[("GET", job, "Bearer secret-1", None)] * 5,
        ("PATCH", f"{apps}/deployments/x-rollout/scale", "Bearer secret-1", none),
        ("PATCH", f"{apps}/statefulsets/x-reward/scale", "Bearer secret-1", none),
    ]


@pytest.mark.parametrize(("code", "ended"), [(404, 0), (403, 1), (500, 1)])
def test_what_cannot_be_scaled_is_tried_again_unless_it_is_gone(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ended: int
) -> None:
    api_server.conditions = [[{"type": "Complete", "status": "True"}]]
    api_server.refused = {"x-rollout": code}
    assert end_run(api_server, tmp_path, monkeypatch) == ended
    assert len(api_server.asked) == 3, "one that fails keeps no other from being scaled"


def test_programs_run_without_packages_as_the_pod_starts_them() -> None:
    for name in ("wait", "end_of_run"):
        text = (FILES / f"{name}.py").read_text(encoding="utf-8")
        command = [sys.executable, "-I", "-S", "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "not enough values to unpack" in done.stderr
