"""Watch for events that must never happen while somebody uses the page."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Dialog, Page, Request

# Cumulative layout shift as Chrome counts it: the worst window of shifts less than a second apart,
# of five seconds at most. A page that is open for long has no more of it for that.
_COUNT_SHIFTS = """
window.layoutShift = 0;
let begun = -Infinity, latest = -Infinity, sum = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.hadRecentInput) continue;
    const isSameWindow = entry.startTime - latest < 1000 && entry.startTime - begun < 5000;
    if (!isSameWindow) { begun = entry.startTime; sum = 0; }
    latest = entry.startTime;
    sum += entry.value;
    window.layoutShift = Math.max(window.layoutShift, sum);
  }
}).observe({ type: "layout-shift", buffered: true });
"""
MOST_SHIFT = 0.1  # what Chrome calls good


class PageWatch:
    """Notes requests to other hosts, messages of the console, errors of scripts and dialogs.

    Args:
        page: Playwright's, before it opens anything.
        expected: console messages with this text are not a problem; empty: all are.
    """

    def __init__(self, page: Page, expected: str = "") -> None:
        self._page = page
        self._expected = expected
        self.problems: list[str] = []
        self.num_requests = 0
        page.add_init_script(_COUNT_SHIFTS)
        page.on("request", self._requested)
        page.on("console", self._logged)
        page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        page.on("dialog", self._opened)

    def check_layout(self) -> None:
        """Note a problem if the content has moved while somebody reads it."""
        shift = float(self._page.evaluate("window.layoutShift"))
        if shift > MOST_SHIFT:
            self.problems.append(f"layout shift {shift:.2f}, more than {MOST_SHIFT}")

    def _requested(self, request: Request) -> None:
        self.num_requests += 1
        url = urlsplit(request.url)
        # An exported page is a file, and may ask for nothing else.
        is_own_file = url.scheme == "file" and self.num_requests == 1
        if url.hostname != "127.0.0.1" and not is_own_file:
            self.problems.append(f"request to elsewhere: {request.url}")

    def _logged(self, message: ConsoleMessage) -> None:
        is_expected = self._expected and self._expected in message.text
        if message.type in {"error", "warning"} and not is_expected:
            self.problems.append(f"console: {message.text}")

    def _opened(self, dialog: Dialog) -> None:
        self.problems.append(f"a dialog opened: {dialog.message}")
        dialog.dismiss()
