"""The page's server over real sockets, on a run folder that is known."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from sluice.dashboard.page import HEADERS
from sluice.dashboard.sample_browser import SampleBrowser
from sluice.dashboard.serving import URL_NAME, serve_page
from sluice.errors import ConfigError
from tests.support.dashboard_run import HOSTILE, add_lines, fill_run, make_run, step_row

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

TOKEN = "service a-token-of-32-characters-or-more"
LONG_S = 60.0


class Server:
    """A page that is served, and a plain HTTP client of it."""

    def __init__(self, url: str) -> None:
        self.port = urlsplit(url).port

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        return await asyncio.to_thread(self._get, path, dict(headers or {}), method)

    def _get(
        self, path: str, headers: dict[str, str], method: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port or 0, timeout=LONG_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    async def json(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        status, _, body = await self.get(path, headers)
        assert status == 200, body
        return json.loads(body)

    async def until(self, path: str, found: str, value: object) -> Any:
        """The answer once it has `value` under `found`."""
        async with asyncio.timeout(LONG_S):
            while (answer := await self.json(path))[found] != value:
                await asyncio.sleep(0.05)
            return answer


@asynccontextmanager
async def serving(run_dir: Path) -> AsyncIterator[Server]:
    stop = asyncio.Event()
    reported: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve_page(run_dir, "127.0.0.1", 0, stop=stop, on_address=reported.put_nowait)
        )
        try:
            async with asyncio.timeout(LONG_S):
                server = Server(await reported.get())
            yield server
        finally:
            stop.set()


async def test_the_page_shows_the_record_of_a_run_that_is_not_running(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        run = await server.until("/api/overview", "step", 3)
        assert (run["health"], run["tokens_per_s"]) == ("not running", 1234.0)
        assert run["accuracy"] == {"step": 3, "value": 0.75}
        assert run["first_accuracy"] == {"step": 0, "value": 0.25}
        (tokens,) = run["accounts"]
        assert [(part["name"], part["share"]) for part in tokens["parts"]] == [
            ("trained", 0.6),
            ("pending", 0.4),
        ]
        curves = await server.json("/api/curves")
        assert curves["curves"]["reward"] == {"x": [1, 2, 3], "y": [-0.5, 0.0, 0.5]}
        assert curves["composition"]["all_right"] == [0.0, 2.0, 0.0]


async def test_numbers_that_come_later_are_shown_without_a_restart(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        await server.until("/api/overview", "step", 3)
        add_lines(tmp_path / "metrics.jsonl", [step_row(4)])
        await server.until("/api/overview", "step", 4)
        (tmp_path / "accounts.json").write_text('{"submitted": 4.0}', encoding="utf-8")
        await server.until("/api/overview", "health", "finished")


async def test_samples_are_filtered_searched_paged_and_opened(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        await server.until("/api/samples", "num_matching", 4)
        wrong = await server.json(f"/api/samples?outcome={quote('all wrong')}&text=pelican")
        assert [group["prompt_id"] for group in wrong["groups"]] == ["wrong"]
        assert wrong["counts"]["failed"] == 1
        first = await server.json("/api/samples?most=3")
        rest = await server.json(f"/api/samples?most=3&after={first['next']}")
        names = [group["prompt_id"] for page in (first, rest) for group in page["groups"]]
        assert sorted(names) == ["mixed", "right", "slow", "wrong"]
        assert rest["next"] is None
        failed = (await server.json("/api/samples?outcome=failed"))["groups"][0]
        group = await server.json(f"/api/samples/{failed['id']}")
        assert group["responses"][0]["text"] == f"{HOSTILE} 0"
        assert group["responses"][0]["failure"] == "scorer_timeout: too slow"
        assert [response["score"] for response in group["responses"]] == [None, 1.0]
        assert (await server.get("/api/samples/99"))[0] == 404


async def test_metrics_settings_logs_and_runs_have_their_answers(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path, "data.train_batch_size=7"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text(f"{HOSTILE}\n", encoding="utf-8")
    async with serving(tmp_path) as server:
        metrics = (await server.json("/api/metrics"))["metrics"]
        reward = next(one for one in metrics if one["name"] == "critic/rewards/mean")
        assert (reward["unit"], reward["newest"]) == ("reward", 0.5)
        points = await server.json("/api/metric?name=critic/rewards/mean")
        assert points["runs"] == [{"x": [1, 2, 3], "y": [-0.5, 0.0, 0.5]}]
        assert (await server.get("/api/metric"))[0] == 400
        assert (await server.get(f"/api/metric?name={'x' * 201}"))[0] == 400
        assert len((await server.json("/api/runs"))["runs"]) == 1
        settings = (await server.json("/api/settings"))["settings"]
        assert [one["key"] for one in settings if one["is_changed"]] == ["data.train_batch_size"]
        assert (await server.json("/api/logs"))["services"] == ["trainer"]
        assert (await server.json("/api/logs?service=trainer"))["lines"] == [HOSTILE]
        assert (await server.json("/api/logs?service=../config"))["lines"] == []


async def test_every_answer_carries_the_headers_and_data_is_never_markup(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    paths = ["/", "/static/main.js", "/api/overview", "/api/samples", "/api/curves"]
    paths += ["/nowhere", "/api/samples/x", "/api/samples?most=0", "/static/..%2fweb_app.py"]
    async with serving(tmp_path) as server:
        for path in paths:
            status, headers, _ = await server.get(path)
            for name, value in HEADERS.items():
                assert headers[name] == value, path
            if path.startswith("/api/") or status >= 400:
                assert headers["Content-Type"].startswith("application/json"), path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(tmp_path: Path, method: str) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        assert (await server.get("/api/samples", method=method))[0] == 405


async def test_what_is_unchanged_is_not_sent_again(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        await server.until("/api/curves", "num_steps", 3)
        for path in ("/", "/static/main.js", "/api/curves"):
            _, headers, _ = await server.get(path)
            again = {"If-None-Match": headers["ETag"]}
            assert (await server.get(path, again))[::2] == (304, b"")
        add_lines(tmp_path / "metrics.jsonl", [step_row(4)])
        await server.until("/api/curves", "num_steps", 4)
        assert (await server.get("/api/curves", again))[0] == 200


async def test_other_names_and_other_sites_are_turned_away(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        for path in ("/", "/api/overview"):
            assert (await server.get(path, {"Host": "evil.example"}))[0] == 403
        cross = {"Sec-Fetch-Site": "cross-site"}
        assert (await server.get("/api/samples", cross))[0] == 403


async def test_with_tokens_no_number_or_text_is_shown_without_one(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    tokens.chmod(0o600)
    fill_run(make_run(tmp_path / "run", f"sluice.security.token_file={tokens}"))
    async with serving(tmp_path / "run") as server:
        assert (await server.get("/"))[0] == 200  # the page itself says nothing of the run
        for path in ("overview", "curves", "samples", "samples/0"):
            status, headers, body = await server.get(f"/api/{path}")
            assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="sluice"')
            assert b"prompt of" not in body
        shown = {"Authorization": f"Bearer {TOKEN.split()[1]}"}
        assert (await server.json("/api/overview", shown))["name"] == "run"


async def test_the_address_stands_in_the_folder_while_the_page_is_served(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        text = (tmp_path / URL_NAME).read_text(encoding="utf-8")
        assert text == f"http://127.0.0.1:{server.port}/\n"
    assert not (tmp_path / URL_NAME).exists()


async def test_an_address_that_a_killed_page_left_is_replaced_and_not_put_back(
    tmp_path: Path,
) -> None:
    fill_run(make_run(tmp_path))
    (tmp_path / URL_NAME).write_text("http://127.0.0.1:9/\n", encoding="utf-8")
    async with serving(tmp_path) as server:
        text = (tmp_path / URL_NAME).read_text(encoding="utf-8")
        assert text == f"http://127.0.0.1:{server.port}/\n"
    assert not list(tmp_path.glob(f"*{URL_NAME}*"))


async def test_a_page_that_ends_leaves_the_address_of_a_later_one(tmp_path: Path) -> None:
    fill_run(make_run(tmp_path))
    async with serving(tmp_path):
        later = "http://127.0.0.1:9/\n"
        (tmp_path / URL_NAME).write_text(later, encoding="utf-8")
    assert (tmp_path / URL_NAME).read_text(encoding="utf-8") == later


async def test_the_environments_token_is_none_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_TOKEN", "of-the-one-who-starts-the-page-32-letters")
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8")
    tokens.chmod(0o600)
    fill_run(make_run(tmp_path / "run", f"sluice.security.token_file={tokens}"))
    async with serving(tmp_path / "run") as server:
        own = {"Authorization": "Bearer of-the-one-who-starts-the-page-32-letters"}
        assert (await server.get("/api/overview", own))[0] == 401
        shown = {"Authorization": f"Bearer {TOKEN.split()[1]}"}
        assert (await server.get("/api/overview", shown))[0] == 200


async def test_lines_that_are_not_understood_are_counted_and_skipped(
    tmp_path: Path,
) -> None:
    fill_run(make_run(tmp_path))
    nested = b"[" * 20_000 + b"]" * 20_000
    bad = [b'{"step": 1, "\xff": 2}', b'{"step": 1e300}', b'{"step": 1, "x": %s}' % nested]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(bad) + b"\n")
    async with serving(tmp_path) as server:
        await server.until("/api/overview", "num_unread_lines", 3)
        add_lines(tmp_path / "metrics.jsonl", [step_row(4)])
        await server.until("/api/overview", "step", 4)


async def test_a_defect_of_reading_is_logged_once_and_the_page_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_browser: SampleBrowser) -> bool:
        raise KeyError("a defect")

    monkeypatch.setattr(SampleBrowser, "read", fail)
    fill_run(make_run(tmp_path))
    async with serving(tmp_path) as server:
        await server.until("/api/overview", "step", 3)
        add_lines(tmp_path / "metrics.jsonl", [step_row(4)])
        await server.until("/api/overview", "step", 4)
    assert len([line for line in caplog.messages if "a defect of the page" in line]) == 1


@pytest.mark.parametrize("own", ["", "of-the-one-who-starts-the-page-32-letters"])
async def test_an_open_interface_without_a_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    if own:
        monkeypatch.setenv("SLUICE_TOKEN", own)
    make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0: other machines .*token_file"):
        await serve_page(
            tmp_path,
            "0.0.0.0",
            0,
            stop=asyncio.Event(),
            on_address=lambda _: None,
        )
