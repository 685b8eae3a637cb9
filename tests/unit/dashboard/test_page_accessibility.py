"""The page's own files, as far as they can be checked without a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import sluice.dashboard

STATIC = Path(next(iter(sluice.dashboard.__path__))) / "static"
PAGE = (STATIC / "index.html").read_text(encoding="utf-8")
STYLE = (STATIC / "dashboard.css").read_text(encoding="utf-8")
SCRIPTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted(STATIC.glob("*.js"))
    if ".min." not in path.name  # uPlot: the page's policy restricts it like our scripts
}
VOID = {"meta", "link", "input", "br"}
MIN_TEXT_CONTRAST, MIN_GRAPHIC_CONTRAST = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11
ON_GROUND = ("text", "soft", "link", "good", "warn", "bad")
PLOTTED = (
    "ink",
    "green",
    "mint",
    "cyan",
    "purple",
    "orange",
    "red",
    "olive",
    "brown",
    "grey",
    "silver",
)


class Outline(HTMLParser):
    """Elements with their attributes, in order, and whether they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name in names]


@pytest.fixture(scope="module")
def outline() -> Outline:
    parser = Outline()
    parser.feed(PAGE)
    return parser


def test_the_page_is_well_formed_and_every_id_is_there_once(outline: Outline) -> None:
    assert outline.open == []
    ids = [a["id"] for _, a in outline.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_it_has_a_language_a_title_one_main_and_a_way_past_the_top(outline: Outline) -> None:
    assert outline.all("html")[0]["lang"] == "en"
    assert len(outline.all("main")) == len(outline.all("h1")) == len(outline.all("title")) == 1
    assert outline.all("a")[0] == {"class": "skip", "href": "#samples"}


def test_headings_leave_out_no_level(outline: Outline) -> None:
    levels = [int(name[1]) for name, _ in outline.elements if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_references_lead_to_something(outline: Outline) -> None:
    ids = {a["id"] for _, a in outline.elements if "id" in a}
    for _, attributes in outline.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            if attributes.get(name):
                assert set(str(attributes[name]).split()) <= ids
        if str(attributes.get("href", "")).startswith("#"):
            assert str(attributes["href"])[1:] in ids


def test_every_field_has_a_label_and_every_button_says_its_kind(outline: Outline) -> None:
    labelled = {attributes["for"] for attributes in outline.all("label")}
    assert {attributes["id"] for attributes in outline.all("input", "select")} <= labelled
    assert all(a.get("type") in {"button", "submit", "reset"} for a in outline.all("button"))


def test_tables_have_captions_and_heads_with_scope(outline: Outline) -> None:
    assert len(outline.all("caption")) == len(outline.all("table")) == 4
    assert all(attributes.get("scope") == "col" for attributes in outline.all("th"))
    made = [text for text in SCRIPTS.values() if 'element(\n    "table"' in text]
    assert made
    assert all('element("caption"' in text for text in made)


def test_every_chart_is_an_image_with_words_a_caption_and_a_table(outline: Outline) -> None:
    figures = outline.all("figure")
    assert len(figures) == len(outline.all("figcaption")) >= 8
    scripts = SCRIPTS["curves.js"] + SCRIPTS["metrics.js"]
    for figure in figures:
        assert re.search(rf"\b{str(figure['id']).removeprefix('chart-')}\b", scripts)
    assert 'role: "img"' in SCRIPTS["chart.js"]
    assert 'setAttribute("aria-label"' in SCRIPTS["chart.js"]


def test_changes_are_announced_and_scrolled_parts_take_the_keyboard(outline: Outline) -> None:
    live = {a["id"] for _, a in outline.elements if a.get("role") in {"status", "alert"}}
    assert {"verdict", "sample-count", "connection", "token-error"} <= live
    scrolled = [a for _, a in outline.elements if a.get("class") == "scroll"]
    assert scrolled
    assert all(a.get("tabindex") == "0" for a in scrolled)
    assert all(a.get("aria-label") or a.get("aria-labelledby") for a in scrolled)


def test_there_is_no_inline_script_or_style_and_nothing_from_elsewhere(outline: Outline) -> None:
    for name, attributes in outline.elements:
        assert not any(key.startswith("on") or key == "style" for key in attributes), name
        for key in ("src", "href"):
            assert not re.match(r"\w+:|//", str(attributes.get(key, ""))), attributes
    assert all(attributes.get("src") for attributes in outline.all("script"))
    assert not outline.all("style")
    for text in (*SCRIPTS.values(), STYLE):
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in STYLE
    assert "url(" not in STYLE


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_reads_text_as_markup_or_code(name: str) -> None:
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|eval\(|"
        r"new Function|createContextualFragment|setHTML|"
        r"\.style(?:\.|\[|\s*=[^=])|javascript:|setTimeout\(\s*[\"'`]"
    )
    assert not re.search(banned, SCRIPTS[name])


def test_scripts_import_only_each_other() -> None:
    for name, text in SCRIPTS.items():
        for source in re.findall(r'from "([^"]+)"', text):
            assert source.removeprefix("./") in SCRIPTS, f"{name}: {source}"


def colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text))


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_drawings_stand_out_from_their_background(scheme: str) -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)", 1)
    found = colours(light) if scheme == "light" else colours(light) | colours(dark)
    for behind in ("ground", "panel"):
        for name in ON_GROUND:
            assert contrast(found[name], found[behind]) >= MIN_TEXT_CONTRAST, (name, behind)
    for name in PLOTTED:
        assert contrast(found[name], found["ground"]) >= MIN_GRAPHIC_CONTRAST, name
    assert contrast(found["ground"], found["warn"]) >= MIN_TEXT_CONTRAST  # marked places


def test_a_hidden_part_stays_hidden_whatever_its_style() -> None:
    assert "[hidden] { display: none !important; }" in STYLE


def test_charts_reserve_their_space_before_they_appear() -> None:
    size = "aspect-ratio: 600 / 220; min-height: 11rem;"
    assert f".chart .plot {{ {size}" in STYLE
    assert f'.chart:not(:has(.plot))::after {{ content: ""; display: block; {size}' in STYLE
