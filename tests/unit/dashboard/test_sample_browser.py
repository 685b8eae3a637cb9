"""Samples as the page lists, filters, searches and opens them."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.dashboard import sample_browser
from sluice.dashboard.line_tail import LineTail
from sluice.dashboard.sample_browser import (
    GroupPage,
    ListedGroup,
    PageCursor,
    SampleBrowser,
    SampleFilter,
    folders_of_run,
)
from sluice.dashboard.sample_lines import GroupLines, GroupReader, SampleSource, ShownOutcome
from sluice.telemetry.samples import DumpedSample, write_dump
from tests.support.dashboard_run import a_group, add_groups

ALL = SampleFilter()
WRONG = SampleFilter(outcomes=frozenset({ShownOutcome.ALL_WRONG}))


def browser_of(run_dir: Path) -> SampleBrowser:
    return SampleBrowser(folders_of_run(run_dir, None))


def read(browser: SampleBrowser) -> SampleBrowser:
    while browser.read():
        pass
    return browser


def names(page: GroupPage) -> list[str]:
    return names_of(page.groups)


def names_of(groups: list[ListedGroup]) -> list[str]:
    return [found.group.prompt_id for found in groups]


def test_groups_of_every_end_are_listed_the_highest_step_first(tmp_path: Path) -> None:
    groups = [
        a_group("kept", step=2),
        a_group("wrong", end="filtered_all_wrong", version=2),
        a_group("old", end="dropped_stale", scores=(), version=0),
    ]
    add_groups(tmp_path, groups)
    browser = read(browser_of(tmp_path))
    page = browser.page(ALL)
    assert names(page) == ["wrong", "kept", "old"]  # of steps 3, 2 and 1
    assert (page.num_matching, page.next) == (3, None)
    assert browser.counts["all wrong"] == browser.counts["trained"] == 1
    assert names(browser.page(WRONG)) == ["wrong"]


def test_groups_that_come_while_it_is_open_are_found_and_come_once(tmp_path: Path) -> None:
    browser = browser_of(tmp_path)
    assert names(read(browser).page(ALL)) == []
    for number in range(3):
        add_groups(tmp_path, [a_group(str(number), step=number + 1)])
        read(browser)
        assert names(browser.page(ALL)) == [str(n) for n in range(number, -1, -1)]


def test_groups_of_a_deleted_file_are_gone_and_the_others_stay(tmp_path: Path) -> None:
    add_groups(tmp_path, [a_group("first")])
    add_groups(tmp_path, [a_group("second")])  # an archive of its own, hence another file
    browser = read(browser_of(tmp_path))
    place = browser.page(ALL).groups[-1].entry
    min((tmp_path / "samples").iterdir()).unlink()
    assert names(read(browser).page(ALL)) == ["second"]
    assert browser.group(place.ordinal) is None


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (SampleFilter(first_step=2), ["3", "2"]),
        (SampleFilter(last_step=2), ["2", "1"]),
        (SampleFilter(min_score=0.5), ["3"]),
        (SampleFilter(max_score=-0.5), ["1"]),
        (SampleFilter(min_score=-0.5, max_score=0.5), ["2"]),
        (SampleFilter(outcomes=frozenset({ShownOutcome.STALE})), []),
    ],
)
def test_filters(tmp_path: Path, wanted: SampleFilter, expected: list[str]) -> None:
    scores = {"1": (-1.0, -1.0), "2": (-1.0, 1.0, None), "3": (1.0, 1.0)}
    add_groups(tmp_path, [a_group(n, scores[n], step=int(n)) for n in scores])
    assert names(read(browser_of(tmp_path)).page(wanted)) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ΣΊΣΥΦΟΣ", ["hill"]),
        ("prompt of hill", ["hill"]),
        ('say "no"', ["quoted"]),
        ("line\nbreak", ["quoted"]),
        ("nowhere", []),
        ("", ["quoted", "hill"]),
    ],
)
def test_a_text_is_found_in_prompts_and_responses_whatever_its_case(
    tmp_path: Path, text: str, found: list[str]
) -> None:
    groups = [
        a_group("hill", text="the name is Σίσυφος"),
        a_group("quoted", text='they say "No", then a line\nbreak'),
    ]
    add_groups(tmp_path, groups)
    assert names(read(browser_of(tmp_path)).page(ALL, text)) == found


def test_pages_cover_the_list_once_while_groups_are_added(tmp_path: Path) -> None:
    add_groups(tmp_path, [a_group(str(n), step=1 + n // 4) for n in range(30)])
    browser = read(browser_of(tmp_path))
    seen: list[str] = []
    after: PageCursor | None = None
    for number in itertools.count():
        page = browser.page(ALL, after=after, limit=7)
        seen += names(page)
        add_groups(tmp_path, [a_group(f"new {number}", step=100)])
        read(browser)
        if page.next is None:
            break
        after = page.next
    assert sorted(seen, key=int) == [str(n) for n in range(30)]


def test_a_search_that_takes_long_returns_its_results_so_far_and_continues(tmp_path: Path) -> None:
    texts = {5: "a needle", 90: "a needle"}
    groups = [a_group(str(n), step=n, text=texts.get(n, "hay")) for n in range(1, 100)]
    add_groups(tmp_path, groups)
    ticks = itertools.count(step=0.3)
    browser = SampleBrowser({SampleSource.ARCHIVE: tmp_path / "samples"}, clock=lambda: next(ticks))
    read(browser)
    pages = [browser.page(ALL, "needle")]
    while pages[-1].next is not None:
        pages.append(browser.page(ALL, "needle", after=pages[-1].next))
    assert len(pages) > 1
    assert [name for page in pages for name in names(page)] == ["90", "5"]
    assert sum(page.num_searched for page in pages) == 99


def test_dumps_in_verls_columns_are_read_as_groups(tmp_path: Path) -> None:
    rows = [
        DumpedSample("1 + 1 = ?", f"it is {n}", truth, float(n), {"uid": uid, "acc": True})
        for uid, n, truth in (("a", 1, "2"), ("a", 2, "2"), ("b", 3, {"target": ["2"]}))
    ]
    write_dump(tmp_path / "validation", rows, 10)
    browser = read(browser_of(tmp_path))
    page = browser.page(ALL)
    assert [found.entry.lines.num_responses for found in page.groups] == [1, 2]
    assert {found.entry.lines.outcome for found in page.groups} == {ShownOutcome.VALIDATION}
    first = page.groups[1].group
    assert [response.text for response in first.responses] == ["it is 1", "it is 2"]
    assert (first.ground_truth, first.responses[0].metrics) == ("2", {"acc": 1.0})
    assert page.groups[0].group.ground_truth == '{"target":["2"]}'
    stamp = (tmp_path / "validation").stat()
    write_dump(tmp_path / "validation", rows[:1], 10)  # a validation that was repeated
    os.utime(tmp_path / "validation", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # in the same tick
    assert [f.entry.lines.num_responses for f in read(browser).page(ALL).groups] == [1]


def test_a_file_that_vanishes_while_they_are_listed_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        add_groups(tmp_path, [a_group(name)])
    browser = read(browser_of(tmp_path))
    scandir = os.scandir

    def vanishing(folder: Path) -> AbstractContextManager[list[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        if folder.name == "samples":
            Path(found[0].path).unlink()
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert names(read(browser).page(ALL)) == ["second"]


@given(st.lists(st.sampled_from("aab"), max_size=12), st.integers(1, 200))
def test_groups_of_a_dump_are_whole_in_whatever_pieces_it_is_read(
    uids: list[str], chunk_bytes: int
) -> None:
    row = '{{"input": "i", "output": "o", "step": 1, "score": {}, "uid": "{}"}}\n'
    content = "".join(row.format(n, uid) for n, uid in enumerate(uids)).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "1.jsonl"
        file.write_bytes(content)
        tail, reader = LineTail(file, chunk_bytes=chunk_bytes), GroupReader(SampleSource.VALIDATION)
        found: list[GroupLines] = []
        while (taken := tail.read_new_lines()).has_more:
            found += reader.take(taken.lines)
        found += reader.end()
    runs = [list(run) for _, run in itertools.groupby(enumerate(uids), key=lambda one: one[1])]
    assert [group.num_responses for group in found] == [len(run) for run in runs]
    for group, run in zip(found, runs, strict=True):
        assert group.mean_score == pytest.approx(sum(n for n, _ in run) / len(run))
        text = content[group.offset : group.offset + group.length]
        assert len(text.splitlines()) == len(run)


def test_a_group_of_a_dump_beyond_one_piece_is_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_browser, "LineTail", lambda path: LineTail(path, chunk_bytes=300))
    rows = [DumpedSample("1 + 1 = ?", "x" * 100, "2", 1.0, {"uid": "a"}) for _ in range(20)]
    write_dump(tmp_path / "validation", rows, 1)
    (found,) = read(browser_of(tmp_path)).page(ALL).groups
    assert found.entry.lines.num_responses == len(found.group.responses) == 20


def test_lines_that_are_no_groups_are_passed_over(tmp_path: Path) -> None:
    add_groups(tmp_path, [a_group("good")])
    (file,) = (tmp_path / "samples").iterdir()
    good = file.read_bytes()
    bad_text, far = good.replace(b"good", b"\xff"), good.replace(b'"version":0', b'"version":%d')
    assert far != good
    bad = [b'{"prompt": 3}\n\n\xff\n', bad_text, far % 2**31, far % 10**30]
    file.write_bytes(b"".join(bad) + good + b'{"torn')
    nested = '{"input": "i", "output": "o", "step": 1, "gts": ' + "[" * 20_000 + "]" * 20_000 + "}"
    rows = [json.dumps([1]), nested, '{"input": "i", "output": "o", "step": 2147483648}']
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "1.jsonl").write_text("".join(f"{row}\n" for row in rows))
    browser = read(browser_of(tmp_path))
    assert names(browser.page(ALL)) == ["good"]
    assert browser.num_unread == 8


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 9))
def test_walking_by_cursor_gives_every_match_once(steps: list[int], most: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        add_groups(Path(folder), [a_group(str(n), step=step) for n, step in enumerate(steps)])
        browser = read(browser_of(Path(folder)))
        whole = browser.page(ALL, limit=50).groups
        walked, page = [], browser.page(ALL, limit=most)
        walked += page.groups
        while page.next is not None:
            page = browser.page(ALL, after=page.next, limit=most)
            walked += page.groups
    assert names_of(walked) == names_of(whole)
    assert sorted(names_of(walked), key=int) == [str(n) for n in range(len(steps))]
    assert [one.entry.lines.step for one in walked] == sorted(steps, reverse=True)


def test_a_full_index_forgets_the_oldest_and_keeps_its_numbers(tmp_path: Path) -> None:
    add_groups(tmp_path, [a_group(str(n), step=n) for n in range(25)])
    browser = SampleBrowser({SampleSource.ARCHIVE: tmp_path / "samples"}, max_groups=10)
    read(browser)
    assert 5 <= sum(browser.counts.values()) <= 10
    newest = browser.group(24)
    assert newest is not None
    assert newest.group.prompt_id == "24"
    assert browser.group(0) is None
