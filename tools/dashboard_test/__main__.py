"""Open the dashboard of a training run in headless Chromium; `make dashboard-test`.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `problems`. Exit
code 0: nothing is wrong; or there is no browser and SLUICE_SKIP_WITHOUT_CHROMIUM=1 allows it.
Needs Playwright beside Python; the Python of `--python` starts the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tools.commands import NoProgramError, ensure_programs
from tools.dashboard_test.training import (
    ENVIRONMENT,
    HOSTILE,
    HOSTILE_LINE,
    HOSTILE_PROMPT,
    Training,
)
from tools.phases import PhaseError, Phases, conclude, conclude_without, tool_parser, until

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TOKEN = "a-token-of-the-browser-test-alone"
_VIEW, _NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 800}
_NUM_CHARTS, _WAIT_S = 16, 120.0
_NUM_TABS = 40  # past the charts, the metric, and the filter of the samples
_STEP = 'Number(document.getElementById("fact-step").textContent.split(" ")[0].replace(",", ""))'
_CHARTS = f"document.querySelectorAll('.chart canvas').length >= {_NUM_CHARTS}"
_ROWS = "document.querySelectorAll('#sample-table button.open').length"
_FOCUS = """(() => {
  const node = document.activeElement;
  const { top, bottom } = node.getBoundingClientRect();
  return [
    node.id || node.getAttribute("aria-label") || node.textContent.trim(),
    getComputedStyle(node).outlineStyle !== "none",
    bottom > 0 && top < innerHeight,
  ];
})()"""
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def main(arguments: Sequence[str]) -> int:
    """Run the test."""
    options, phases = _parse(arguments), Phases()
    try:
        browser = chromium()
    except NoProgramError as error:
        return conclude_without(error, "SLUICE_SKIP_WITHOUT_CHROMIUM", {"phases": {}})
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sluice-dashboard-") as scratch:
        log = options.pictures / "run.log"
        try:
            with Training(options.python, Path(scratch) / "run", log, options.steps) as training:
                _use(training, browser, options, phases, problems)
        except Exception as error:  # noqa: BLE001 - Playwright's errors are reported like ours
            problems.append(f"{type(error).__name__}: {error}")
    return conclude({"phases": phases.seconds}, problems)


def _use(
    training: Training,
    browser: str,
    options: argparse.Namespace,
    phases: Phases,
    problems: list[str],
) -> None:
    with phases.phase("start of the run"):
        url = training.url(options.patience)
    with _page(browser, url, problems, options.pictures / "running.png") as page:
        with phases.phase("the page while it trains"):
            see_the_run(page)
        with phases.phase("every panel has data"):
            see_the_panels(page)
        with phases.phase("a search"):
            training.add_hostile_group()
            find_a_hostile_group(page)
        with phases.phase("any metric"):
            see_any_metric(page)
        with phases.phase("logs, processes and configuration"):
            training.add_hostile_log_line()
            see_the_services(page)
        with phases.phase("a narrow window, also in the dark"):
            page.set_viewport_size(_NARROW)
            page.emulate_media(color_scheme="dark")
            _until(page, f"{_OVERFLOW} <= 0")
        with phases.phase("the keyboard alone"):
            use_the_keyboard(page)
    with phases.phase("end of the run"):
        training.wait(options.patience)
    report = options.pictures / "report.png"
    with (
        phases.phase("the exported page"),
        _page(browser, training.report.as_uri(), problems, report) as page,
    ):
        _until(page, _CHARTS)
        _until(page, f"{_ROWS} >= 1")
    refused, shown = "401 (Unauthorized)", options.pictures / "finished.png"
    with (
        phases.phase("a token"),
        training.page_with_token(_TOKEN, options.patience) as url,
        _page(browser, url, problems, shown, expected=refused) as page,
    ):
        show_a_token(page, _TOKEN)
        see_the_runs_side_by_side(page)


def see_the_run(page: Page) -> None:
    """Check that the first lines are filled, and that the step rises without a reload."""
    _until(page, "document.getElementById('verdict').dataset.verdict !== 'loading'")
    _until(page, f"{_STEP} > 0")
    before = int(page.evaluate(_STEP))
    _until(page, f"{_STEP} > {before}")
    facts = ("phase", "step", "accuracy", "reward", "tokens", "wait")
    if empty := [name for name in facts if page.locator(f"#fact-{name}").inner_text() == "-"]:
        raise PhaseError(f"the first lines show nothing for: {', '.join(empty)}")


def see_the_panels(page: Page) -> None:
    """Check that charts, accounting, fleet and samples show something."""
    _until(page, _CHARTS)
    _until(page, f"document.querySelectorAll('.chart .plot[aria-label]').length >= {_NUM_CHARTS}")
    _until(page, "document.querySelectorAll('#accounts table').length >= 3")
    _until(page, "document.querySelectorAll('#fleet-table tbody tr').length >= 1")
    _until(page, f"{_ROWS} >= 1")


def find_a_hostile_group(page: Page) -> None:
    """Search for a group whose responses hold markup; check that the page shows it as text."""
    page.get_by_label("Text of prompt or response").fill("FOLLOWED by a hostile")
    page.get_by_role("button", name="Find").click()
    _until(page, f"{_ROWS} === 1")
    if HOSTILE_PROMPT not in page.locator("#sample-table tbody").inner_text():
        raise PhaseError("the search found something else")
    page.locator("#sample-table button.open").first.click()
    page.locator("#group pre.response").first.wait_for()
    shown = page.locator("#group pre.response").all_inner_texts()
    if shown != [HOSTILE] * 2 or page.locator("#group img, #group script").count():
        raise PhaseError(f"the page changed the response: {shown}")
    if (read := page.locator("#group pre.read").all_inner_texts()) != [HOSTILE]:
        raise PhaseError(f"the page changed what an episode read: {read}")
    text = page.locator("#group").inner_text()
    if missing := [
        one for one in (ENVIRONMENT, "1 turn", "environment 0.250 s") if one not in text
    ]:
        raise PhaseError(f"the page does not show of an episode: {', '.join(missing)}")


def see_any_metric(page: Page) -> None:
    """Choose a metric, against wall-clock time; check its meaning and its chart's words."""
    page.get_by_label("Metric of metrics.jsonl").fill("actor/grad_norm")
    page.get_by_label("Against").select_option("seconds")
    words = "document.querySelector('#chart-metric .plot').getAttribute('aria-label')"
    _until(page, f"{words}.startsWith('actor/grad_norm:') && {words}.includes('wall-clock time')")
    if "norm before clipping" not in page.locator("#metric-note").inner_text():
        raise PhaseError("the page does not say what the metric means")


def see_the_services(page: Page) -> None:
    """Check processes and settings, and that a log's markup and control characters stay text."""
    page.locator("#log").scroll_into_view_if_needed()
    page.wait_for_selector("#log-service option[value=reward]", state="attached")
    page.get_by_label("Service").select_option("reward")
    page.locator("#log").get_by_text(HOSTILE_LINE, exact=False).wait_for()
    if page.locator("#log script, #log img").count():
        raise PhaseError("the page reads a log as markup")
    _until(page, "document.querySelectorAll('#process-table tbody tr').length >= 4")
    _until(page, "document.querySelectorAll('#settings-changed tbody tr').length >= 5")


def use_the_keyboard(page: Page) -> None:
    """Press Tab from the top; check that the focus moves on, is on the screen and can be seen."""
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.locator("#run-name").click()
    seen = []
    for _ in range(_NUM_TABS):
        page.keyboard.press("Tab")
        name, has_outline, is_on_screen = page.evaluate(_FOCUS)
        if not (has_outline and is_on_screen):
            raise PhaseError(f"the focus cannot be seen on {name}")
        seen.append(name)
    if len(set(seen)) < _NUM_TABS or not {"metric", "axis"} <= set(seen):
        raise PhaseError(f"Tab does not reach everything: {', '.join(seen)}")


def see_the_runs_side_by_side(page: Page) -> None:
    """Check charts and tables of two runs."""
    _until(page, "!document.getElementById('runs').hidden")
    _until(page, "document.querySelectorAll('#runs .chart canvas').length === 4")
    _until(page, "document.querySelectorAll('#runs-tables table').length === 3")


def show_a_token(page: Page, token: str) -> None:
    """Check that a wrong token shows nothing of the run, and the right one all of it."""
    page.get_by_label("Token", exact=True).fill("another-token-of-many-characters")
    page.keyboard.press("Enter")
    page.get_by_text("This token is not one of the run's.").wait_for()
    if page.locator("#run").is_visible():
        raise PhaseError("the page shows the run without a token")
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Show the run").click()
    page.wait_for_selector('#verdict[data-verdict="finished"]')
    page.wait_for_selector("#sample-table button.open")


@contextmanager
def _page(
    browser: str, url: str, problems: list[str], picture: Path, expected: str = ""
) -> Iterator[Page]:
    """Open a page; note requests to other hosts, errors of scripts and messages of the console.

    Args:
        browser: the path of a Chromium.
        url: of the page.
        problems: gets what must never happen.
        picture: a screenshot at the end of the block, also of a failure.
        expected: a message of the console with this text is no problem.
    """
    from playwright.sync_api import sync_playwright

    def note_message(message: ConsoleMessage) -> None:
        is_expected = expected and expected in message.text
        if message.type in {"error", "warning"} and not is_expected:
            problems.append(f"console: {message.text}")

    def note_request(target: str) -> None:
        # An exported page is a file, and may request nothing else.
        if urlsplit(target).hostname != "127.0.0.1" and target != url:
            problems.append(f"request to elsewhere: {target}")

    # In containers Chromium needs these: no sandbox as root, and a small /dev/shm.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        process = playwright.chromium.launch(executable_path=browser, args=flags)
        try:
            page = process.new_page(viewport=_VIEW, reduced_motion="reduce")
            page.set_default_timeout(1000 * _WAIT_S)
            page.on("request", lambda request: note_request(request.url))
            page.on("console", note_message)
            page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
            page.goto(url)
            try:
                yield page
            finally:
                page.screenshot(path=str(picture))
        finally:
            process.close()


def _until(page: Page, condition: str) -> None:
    """Poll from outside: the page's policy forbids Playwright's own wait, which evaluates text."""
    until(condition, lambda: bool(page.evaluate(condition)), timeout_s=_WAIT_S)


def chromium() -> str:
    """Return the path of one; install Debian's package only if SLUICE_INSTALL_CHROMIUM=1.

    Raises:
        NoProgramError: there is none.
    """
    if not any(map(shutil.which, _CHROMIUMS)):
        ensure_programs(("chromium",), ("chromium",), "SLUICE_INSTALL_CHROMIUM")
    return next(path for name in _CHROMIUMS if (path := shutil.which(name)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m tools.dashboard_test --python .venv/bin/python")
    parser.add_argument("--python", default=sys.executable, help="with the project's packages")
    parser.add_argument("--steps", type=int, default=30, help="of training")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for each wait")
    parser.add_argument(
        "--pictures", type=Path, default=Path("build/dashboard"), help="folder of screenshots"
    )
    options = parser.parse_args(arguments)
    options.pictures.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
