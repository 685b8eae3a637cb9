"""The steps of an operator who uses the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tools.dashboard_test.training import HOSTILE, HOSTILE_PROMPT
from tools.phases import PhaseError, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

_PATIENCE_S = 120.0
_MOST_TABS = 80
_SCORE = re.compile(r"score -?\d+\.\d+")
_STEP_ABOVE = """(least) =>
  Number(document.getElementById("fact-step").textContent.split(" ")[0].replace(",", "")) > least
"""


class ClickThrough:
    """Uses an open page by its texts and roles, as people and screen readers do.

    Args:
        page: a page of Playwright.
        pictures: the folder of screenshots.
    """

    def __init__(self, page: Page, pictures: Path) -> None:
        self._page, self._pictures = page, pictures
        page.set_default_timeout(1000 * _PATIENCE_S)

    def see_the_run(self) -> None:
        """The first lines have a verdict, the step, and the service that is waited for."""
        page = self._page
        self._until("document.getElementById('verdict').dataset.verdict !== 'loading'")
        self._until(_STEP_ABOVE, 0)
        _need(page.locator("#verdict").inner_text().strip() != "", "there is no verdict")
        _need(page.locator("#fact-wait").inner_text() != "-", "there is no text about waits")
        _need(page.locator("#fleet-table tbody tr").count() >= 1, "the fleet is empty")

    def see_a_step_done(self) -> None:
        """The step increases without a reload."""
        before = int(self._page.locator("#fact-step").inner_text().split(" ")[0].replace(",", ""))
        self._until(_STEP_ABOVE, before + 1)

    def see_the_charts(self) -> None:
        """Every chart is an image with words; the table of one opens and has rows."""
        page = self._page
        self._until("document.querySelectorAll('.chart .plot[aria-label]').length >= 8")
        page.get_by_text("Data of “Mean reward of trained groups”").click()
        page.get_by_role("table", name="Mean reward of trained groups").wait_for()
        self._until("document.querySelectorAll('#chart-reward tbody tr').length >= 1")
        page.get_by_text("Data of “Mean reward of trained groups”").click()
        _need(page.locator(".chart canvas").count() >= 8, "a chart is empty")

    def find_all_wrong_groups(self) -> None:
        """The list holds only the groups with the selected outcome."""
        page = self._page
        page.get_by_role("checkbox", name=re.compile("^all wrong")).check()
        self._until(_ONLY_OUTCOME, "all wrong")

    def find_a_text(self) -> None:
        """A search finds the one group with a text."""
        page = self._page
        page.get_by_label("Text of prompt or response").fill("FOLLOWED by a hostile")
        page.get_by_role("button", name="Find").click()
        self._until(_NUM_ROWS, 1)
        _need(
            HOSTILE_PROMPT in page.locator("#sample-table tbody").inner_text(),
            "the search found something else",
        )

    def read_a_hostile_group(self) -> None:
        """Markup in a response is shown as text."""
        page = self._page
        page.locator("#sample-table button.open").first.click()
        group = page.get_by_role("region", name=re.compile("^Group hostile"))
        group.locator("pre.response").first.wait_for()
        shown = group.locator("pre.response").all_inner_texts()
        _need(shown == [HOSTILE] * 2, f"the response is changed: {shown}")
        _need(group.locator("img, script").count() == 0, "a response became markup")
        _need(page.title() != "broken", "a response ran")
        page.get_by_role("button", name="Back to the list").click()
        page.get_by_role("button", name="Clear").click()

    def read_a_group(self, num_responses: int) -> None:
        """A group of the run opens with all of its responses and their scores."""
        page = self._page
        page.get_by_role("checkbox", name=re.compile("^trained")).check()
        self._until(_ONLY_OUTCOME, "trained")
        page.locator("#sample-table button.open").first.click()
        group = page.get_by_role("region", name=re.compile("^Group .*: trained"))
        group.locator("pre.response").first.wait_for()
        heads = group.locator(".responses .head").all_inner_texts()
        _need(len(heads) == num_responses, f"{len(heads)} responses, not {num_responses}")
        _need(all(_SCORE.search(head) for head in heads), f"without a score: {heads}")
        _need(all(group.locator("pre").all_inner_texts()), "a text is missing")
        self._page.screenshot(path=str(self._pictures / "samples.png"))
        page.get_by_role("button", name="Group below").click()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Clear").click()

    def use_the_keyboard_alone(self) -> None:
        """Past the top, a filter, a search, a group and back, without a mouse."""
        page = self._page
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        page.reload()
        page.wait_for_selector("#sample-table button.open")
        page.keyboard.press("Tab")
        _need(_focused(page) == "Skip to the samples", "the first stop is not the skip link")
        page.keyboard.press("Enter")
        self._tab_to("#outcome-all-wrong")
        page.keyboard.press("Space")
        self._until(_ONLY_OUTCOME, "all wrong")
        self._tab_to("#text")
        page.keyboard.type("hostile response")
        page.keyboard.press("Enter")
        self._until(_NUM_ROWS, 1)
        self._tab_to("#sample-table button.open")
        page.keyboard.press("Enter")
        page.wait_for_selector("#group:not([hidden])")
        _need(page.evaluate("document.activeElement.id") == "group", "the group has no focus")
        page.keyboard.press("Escape")
        page.wait_for_selector("#group", state="hidden")
        _need(HOSTILE_PROMPT in _focused(page), "the focus did not come back to the list")

    def show_a_token(self, token: str) -> None:
        """Nothing is shown without a token, nor with a wrong one."""
        page = self._page
        page.get_by_label("Token", exact=True).fill("another-token-of-many-characters")
        page.keyboard.press("Enter")
        page.get_by_text("This token is not one of the run's.").wait_for()
        _need(not page.locator("#run").is_visible(), "the run is shown without a token")
        page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("button", name="Show the run").click()
        page.locator("#run").wait_for()
        page.wait_for_selector("#sample-table button.open")

    def see_the_end(self) -> None:
        """The page of a finished run has its verdict and its results."""
        page = self._page
        page.wait_for_selector('#verdict[data-verdict="finished"]')
        page.wait_for_selector("#sample-table button.open")
        self._until("document.querySelectorAll('#accounts table').length >= 3")

    def read_the_report(self) -> None:
        """The exported page shows charts and responses, and opens a group, without a server."""
        page = self._page
        self._until("document.querySelectorAll('.chart canvas').length >= 8")
        self._until("document.querySelectorAll('#comparison-table tbody tr').length >= 1")
        _need(page.locator("#verdict").inner_text() == "finished", "the verdict is another one")
        _need(not page.locator("#sample-filter").is_visible(), "it offers a search")
        page.locator("#sample-table button.open").first.click()
        page.locator("#group pre.response").first.wait_for()
        page.keyboard.press("Escape")
        self.picture("report", "#comparison")

    def picture(self, name: str, selector: str | None = None) -> None:
        """Saves the top of the page, or one part of it."""
        file = str(self._pictures / f"{name}.png")
        if selector is None:
            self._page.evaluate("window.scrollTo(0, 0)")
            self._page.screenshot(path=file)
        else:
            self._page.locator(selector).screenshot(path=file)

    def _until(self, condition: str, value: object = None) -> None:
        """Polls from outside: Playwright's own wait evaluates text in the page, which the page's
        policy forbids."""
        until(
            condition,
            lambda: bool(self._page.evaluate(condition, value)),
            timeout_s=_PATIENCE_S,
            interval_s=0.1,
        )

    def _tab_to(self, selector: str) -> None:
        for _ in range(_MOST_TABS):
            self._page.keyboard.press("Tab")
            if self._page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise PhaseError(f"{selector} is not reached by {_MOST_TABS} presses of Tab")


_NUM_ROWS = "(num) => document.querySelectorAll('#sample-table button.open').length === num"
_ONLY_OUTCOME = """(outcome) => {
  const rows = [...document.querySelectorAll("#sample-table tbody tr")];
  return rows.length > 0 && rows.every((row) => row.cells[2].textContent === outcome);
}"""


def _focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.textContent"))


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise PhaseError(problem)
