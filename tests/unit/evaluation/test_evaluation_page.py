"""The page of evaluations: whatever a model writes stays text, and one file is all there is."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from sluice.dashboard.page import policy_source
from sluice.evaluation.comparison import read_evaluations
from sluice.evaluation.page import write_page
from sluice.evaluation.results import Results, write_results
from tests.support.stored_evaluation import evaluation, graded, prompt, sample, store

HOSTILE = (
    "\"'></pre></details></section><script>alert(1)</script><img src=x onerror=alert(2)>"
    "<style>*{display:none}</style><a href='javascript:alert(3)'>x</a>&lt;script&gt;"
    "\u202e\x00\x1b[2J"
)
KNOWN_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "nav", "a", "main", "section"),
    *("h1", "h2", "h3", "h4", "div", "p", "pre", "span", "ul", "li", "dl", "dt", "dd"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "fieldset", "legend", "input", "label"),
}


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page(folders: list[Path], file: Path, **limits: int) -> str:
    write_page(read_evaluations(folders), file, **limits)
    return file.read_text(encoding="utf-8")


def seen(text: str) -> Seen:
    found = Seen()
    found.feed(text)
    assert found.open == []
    return found


def hostile_evaluation(folder: Path) -> Path:
    benchmark = HOSTILE.replace("/", "_").replace("\x00", "")[:60]
    one = sample(
        HOSTILE, metrics={"acc": 1.0, HOSTILE: 2.0, "pred": HOSTILE}, finish_reason=HOSTILE
    )
    failed = sample(HOSTILE, acc=None, failure=HOSTILE, earlier=[{"failure": HOSTILE}])
    asked = [{"role": HOSTILE, "content": HOSTILE}]
    stored = [
        prompt(0, [one, failed], data_source=HOSTILE, prompt=asked, ground_truth=HOSTILE),
        prompt(1, [one, one], extra_info={HOSTILE: HOSTILE}),
    ]
    store(folder, stored, benchmark)
    write_results(folder, Results(HOSTILE, {HOSTILE: HOSTILE}, 2, 1.0, {}))
    return folder


def test_no_text_of_a_model_or_of_data_becomes_markup(tmp_path: Path) -> None:
    folders = [hostile_evaluation(tmp_path / name) for name in ("a", "<b>&")]
    found = seen(page(folders, tmp_path / "page.html"))
    assert {tag for tag, _ in found.tags} <= KNOWN_TAGS
    attributes = {name for _, given in found.tags for name in given}
    assert not {name for name in attributes if name.startswith("on") or name in {"style", "src"}}
    assert all(g["href"].startswith("#") for t, g in found.tags if t == "a" and g["href"])
    assert any("<script>alert(1)</script>" in text for text in found.texts)


def test_characters_that_hide_or_reorder_text_are_shown_as_escapes(tmp_path: Path) -> None:
    text = page([hostile_evaluation(tmp_path / "a")], tmp_path / "page.html")
    assert not re.search("[\u202e\x00\x1b]", text)
    assert r"\u202e\x00\x1b[2J" in text


def test_the_policy_of_the_page_admits_its_own_styles_and_nothing_else(tmp_path: Path) -> None:
    text = page([evaluation(tmp_path / "a", [graded(0, 1.0)])], tmp_path / "page.html")
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    (policy,) = [
        given["content"]
        for tag, given in seen(text).tags
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == f"default-src 'none'; style-src {policy_source(style)}; base-uri 'none'"


def test_the_same_evaluations_give_the_same_bytes(tmp_path: Path) -> None:
    folders = [evaluation(tmp_path / name, [graded(0, 1.0), graded(1, 0.0)]) for name in "ab"]
    assert page(folders, tmp_path / "1.html") == page(folders, tmp_path / "2.html")


def test_responses_of_all_checkpoints_to_a_prompt_are_beside_each_other(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "a", [prompt(0, [sample("it is 3", acc=0.0)])])
    second = evaluation(tmp_path / "b", [prompt(0, [sample("it is 2")])])
    text = page([first, second], tmp_path / "page.html")
    (details,) = re.findall('<details class="prompt.*?</details>', text)
    assert details.index("it is 3") < details.index("it is 2")
    assert 'class="prompt group changed"' in details
    assert "0/1" in details
    assert "1/1" in details


def test_prompts_that_differ_most_come_first_and_the_limit_leaves_out_the_others(
    tmp_path: Path,
) -> None:
    first = evaluation(tmp_path / "a", [graded(0, 0.0), graded(1, 0.0), graded(2, 1.0)])
    second = evaluation(tmp_path / "b", [graded(0, 0.0), graded(1, 0.5), graded(2, 0.0)])
    text = page([first, second], tmp_path / "page.html", max_prompts=2)
    assert re.findall('class="position">(\\d+)<', text) == ["2", "1"]
    assert "1 more are in the evaluations" in text


def test_both_right_and_wrong_responses_are_shown_where_there_are_both(tmp_path: Path) -> None:
    samples = [sample(f"wrong {n}", acc=0.0) for n in range(8)] + [sample("the right one")]
    text = page([evaluation(tmp_path / "a", [prompt(0, samples)])], tmp_path / "page.html")
    assert "the right one" in text
    assert len(re.findall("<pre>wrong", text)) == 3
    assert "1 of 9 right, 4 shown" in text


def test_a_long_response_is_shortened(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", [prompt(0, [sample("long " * 10_000)])])
    text = page([folder], tmp_path / "page.html")
    assert "characters left out" in text
    assert len(text) < 40_000


def test_an_earlier_grade_is_beside_the_present_one(tmp_path: Path) -> None:
    one = sample(acc=1.0, earlier=[{"reward": -1.0}])
    text = page([evaluation(tmp_path / "a", [prompt(0, [one])])], tmp_path / "page.html")
    assert "before: reward -1" in text


def test_instructions_that_all_prompts_begin_with_are_left_out_of_their_lines(
    tmp_path: Path,
) -> None:
    def asked(number: int) -> dict[str, object]:
        content = f"Answer in a box.\n\nProblem {number}0 is it"
        return prompt(number, [sample()], prompt=[{"role": "user", "content": content}])

    text = page([evaluation(tmp_path / "a", [asked(1), asked(2)])], tmp_path / "page.html")
    assert re.findall('class="excerpt">(.*?)<', text) == ["10 is it", "20 is it"]
