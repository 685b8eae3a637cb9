"""Use the live page of a training run in headless Chromium; `make dashboard-test`.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `problems`. Exit
code 0: all is as it has to be; or there is no browser and SLUICE_SKIP_WITHOUT_CHROMIUM=1 allows it.
Needs Playwright beside Python; the run is started with the Python of `--python`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tools.commands import NoProgramError
from tools.dashboard_test.chromium import chromium, launch_arguments
from tools.dashboard_test.click_through import ClickThrough
from tools.dashboard_test.page_watch import PageWatch
from tools.dashboard_test.training import Training
from tools.phases import Phases, conclude, say

if TYPE_CHECKING:
    from playwright.sync_api import Page

SKIP_VARIABLE = "SLUICE_SKIP_WITHOUT_CHROMIUM"
_TOKEN = "a-token-of-the-browser-test-alone"
_SAMPLES = 8  # of the quickstart's groups
_VIEW = {"width": 1280, "height": 800}


def main(arguments: Sequence[str]) -> int:
    """Run the test."""
    options, phases = _parse(arguments), Phases()
    try:
        path = chromium()
    except NoProgramError as error:
        say(f"NO BROWSER: {error}")
        if os.environ.get(SKIP_VARIABLE) == "1":
            return conclude({"phases": {}, "skipped": str(error)}, [])
        return conclude({"phases": {}}, [str(error)])
    with tempfile.TemporaryDirectory(prefix="sluice-dashboard-") as scratch:
        log = options.pictures / "run.log"
        try:
            with Training(options.python, Path(scratch) / "run", log, options.steps) as training:
                problems = _use(training, path, options, phases)
        except Exception as error:  # noqa: BLE001 - Playwright's errors are reported like ours
            problems = [f"{type(error).__name__}: {error}"]
    return conclude({"phases": phases.seconds}, problems)


def _use(training: Training, path: str, options: argparse.Namespace, phases: Phases) -> list[str]:
    with phases.phase("start of the run"):
        url = training.url(options.patience)
    problems: list[str] = []
    with _page(path) as page:
        watch = PageWatch(page)
        try:
            page.goto(url)
            _while_it_trains(ClickThrough(page, options.pictures), training, phases)
        except Exception:
            page.screenshot(path=str(options.pictures / "failure.png"))
            raise
        finally:
            watch.check_layout()
            problems += watch.problems
            say(f"{watch.num_requests} requests, {len(watch.problems)} problems: {watch.problems}")
    with phases.phase("end of the run"):
        training.wait(options.patience)
    with _page(path) as page:
        watch = PageWatch(page)
        page.goto(training.report.as_uri())
        with phases.phase("the exported page"):
            ClickThrough(page, options.pictures).read_the_report()
        problems += watch.problems
    with training.page_afterwards(options.patience) as url, _page(path) as page:
        watch = PageWatch(page)
        page.goto(url)
        _afterwards(ClickThrough(page, options.pictures), page, phases)
        problems += watch.problems
    with training.page_afterwards(options.patience, _TOKEN) as url, _page(path) as page:
        watch = PageWatch(page, expected="401 (Unauthorized)")
        page.goto(url)
        with phases.phase("a token"):
            ClickThrough(page, options.pictures).show_a_token(_TOKEN)
        problems += watch.problems
    return problems


def _while_it_trains(user: ClickThrough, training: Training, phases: Phases) -> None:
    with phases.phase("first look"):
        user.see_the_run()
    training.add_hostile_group()
    for name, act in (
        ("a step is done", user.see_a_step_done),
        ("charts", user.see_the_charts),
        ("all wrong", user.find_all_wrong_groups),
        ("search", user.find_a_text),
        ("hostile response", user.read_a_hostile_group),
        ("open a group", lambda: user.read_a_group(_SAMPLES)),
        ("keyboard alone", user.use_the_keyboard_alone),
    ):
        with phases.phase(name):
            act()
    user.picture("running")


def _afterwards(user: ClickThrough, page: Page, phases: Phases) -> None:
    with phases.phase("the page afterwards"):
        user.see_the_end()
    with phases.phase("pictures"):
        user.picture("overview")
        user.picture("accounting", "#accounting")
        page.emulate_media(color_scheme="dark")
        user.picture("overview-dark")


@contextmanager
def _page(path: str) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=launch_arguments())
        try:
            yield browser.new_page(viewport=_VIEW, reduced_motion="reduce")
        finally:
            browser.close()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.dashboard_test",
        description="Uses the live page of a training run in headless Chromium.",
        epilog="example: python -m tools.dashboard_test --python .venv/bin/python",
    )
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
