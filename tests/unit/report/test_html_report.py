"""The page about a run: complete in itself, and safe whatever the model wrote."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sluice.report.html_report import charts, write_report
from sluice.report.run_record import read_run
from sluice.report.summary import summarize
from tests.support.run_folder import (
    ACCOUNTING,
    ACCOUNTS,
    STEPS,
    VALIDATIONS,
    run_folder,
    write_examples,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></td><img src=x onerror=alert(2)>",
    "{{ 7 * 7 }} {% raw %} & \x00 <!-- <svg onload=alert(3)>",
)
NUM_CHARTS = 6


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(folder: Path, **record: Any) -> Page:
    run_folder(folder, **record)
    summary = summarize(folder, seconds_total=10, seconds_services=9)
    write_report(folder, summary, folder / "report.html")
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose name and responses are hostile, with what an earlier run has left there."""
    folder = tmp_path_factory.mktemp("runs") / "<b>run<"
    folder.mkdir()
    write_examples(folder, 0, "first words", *HOSTILE)
    write_examples(folder, 2, "last words", *HOSTILE)
    write_examples(folder, 60, "words of another run")
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return report(folder)


def test_the_page_shows_numbers_charts_and_samples(page: Page) -> None:
    for words in ("0.250 → 0.750", "step 0 → 2, 16 problems", "20 submitted"):
        assert words in page.text
    assert page.count("figcaption") == NUM_CHARTS
    assert page.text.index("first words") < page.text.index("last words")


def test_the_page_tells_where_tokens_and_time_went(page: Page, tmp_path: Path) -> None:
    reported = report(tmp_path, accounts={**ACCOUNTS, **ACCOUNTING})
    assert (
        "trained 60.0 %, filtered all right 25.0 %, pending 15.0 %; residual 0.0 %" in reported.text
    )
    assert "generating 90.0 %" in reported.text
    assert "Where tokens and time went" not in page.text


def test_hostile_text_stays_text(page: Page) -> None:
    assert page.count("script") == page.count("img") == 0
    assert page.count("svg") == NUM_CHARTS
    assert not [name for _, attributes in page.tags for name in attributes if name[:2] == "on"]
    assert page.text.count("<script>alert(1)</script>") == 2
    assert page.text.count("{{ 7 * 7 }}") == 2
    assert page.text.count("<b>run<") == 2  # title and heading


def test_the_page_needs_nothing_from_outside(page: Page, folder: Path) -> None:
    links = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in {"src", "href", "xlink:href", "action", "data"} and value
    ]
    assert all(link.startswith("#") for link in links)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\((?!#)", text)
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_a_sample_that_an_earlier_run_left_is_not_shown(page: Page) -> None:
    assert "words of another run" not in page.text


def test_the_same_run_gives_the_same_bytes(page: Page, folder: Path) -> None:
    first = (folder / "report.html").read_bytes()
    report(folder)
    assert (folder / "report.html").read_bytes() == first


def test_a_run_without_steps_and_with_one_validation_has_a_page_too(tmp_path: Path) -> None:
    write_examples(tmp_path, 0, "only")
    page = report(tmp_path, steps=(), validations=VALIDATIONS[:1])
    assert page.count("svg") == NUM_CHARTS
    assert "No two validations with example responses were recorded." in page.text


def test_every_chart_names_its_axes_and_a_legend_leaves_out_what_there_was_not(
    page: Page,
) -> None:
    assert page.text.count("step\n") + page.text.count("seconds\n") >= NUM_CHARTS
    for label in ("kept (mixed)", "all right", "all wrong", "million tokens"):
        assert label in page.text
    assert "other" not in page.text.split("Accounts")[0].replace("another", "")


def test_groups_that_were_stale_or_failed_are_drawn_as_other(tmp_path: Path) -> None:
    stale = [{**STEPS[0], "train/groups_stale": 2.0}]
    sampled = charts(read_run(run_folder(tmp_path, steps=stale)))[2]
    assert sampled.title == "What the sampled groups were"
    assert "other" in Page(sampled.svg).text


def test_a_run_that_validated_only_at_its_end_has_a_page_too(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, validations=VALIDATIONS[1:])
    summary = summarize(folder, seconds_total=1.0, seconds_services=1.0)
    assert summary.accuracy_before is None
    write_report(folder, summary, folder / "report.html")
    assert "0.750" in Page((folder / "report.html").read_text(encoding="utf-8")).text
