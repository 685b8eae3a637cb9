"""The page of evaluations: numbers, and responses to the same prompts beside each other.

One file without scripts: it needs no server and no network. Responses are hostile text; all of it
is escaped, and the page's policy admits nothing but its own style sheet.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

from sluice.dashboard.page import policy_source
from sluice.evaluation.comparison import (
    ComparedBenchmark,
    ComparedPrompt,
    Evaluation,
    PromptKey,
    compare_benchmarks,
    read_evaluations,
)
from sluice.evaluation.statistics import estimate_text, is_correct
from sluice.evaluation.stored_responses import (
    StoredGrade,
    StoredPrompt,
    StoredSample,
    read_at,
)
from sluice.safe_text import printable
from sluice.telemetry.samples import shorten_middle
from sluice.whole_file import write_whole

PAGE_NAME = "report.html"
USUAL_PROMPTS, USUAL_RESPONSES = 100, 4
_FILTERS = {"all": "all", "changed": "changed", "wrong": "never right", "right": "always right"}
_TITLE = "Evaluation"
_EMPTY_ELEMENTS = frozenset({"input", "meta"})
_MAX_CHARS, _EXCERPT_CHARS, _TRUTH_CHARS, _FAILURE_CHARS, _VALUE_CHARS = 4000, 300, 400, 400, 100


def write_report(folder: Path) -> None:
    """Write the page of one evaluation into its folder; errors as `write_page`."""
    write_page(read_evaluations([folder]), folder / PAGE_NAME)


def write_page(
    evaluations: Sequence[Evaluation],
    file: Path,
    *,
    max_prompts: int = USUAL_PROMPTS,
    max_responses: int = USUAL_RESPONSES,
) -> None:
    """Write the page of some evaluations. The same evaluations give the same bytes.

    Args:
        evaluations: read before; differences are from the first one.
        file: the file to write; others see the former one or the new one.
        max_prompts: prompts of each benchmark with responses, those that differ most first.
        max_responses: of each prompt and evaluation.

    Raises:
        DataError: a file of responses was written again since.
        OSError: a file cannot be read or written.
    """
    benchmarks = compare_benchmarks(evaluations)
    content = page_of(evaluations, benchmarks, max_prompts, max(1, max_responses))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content.encode())


def page_of(
    evaluations: Sequence[Evaluation],
    benchmarks: Sequence[ComparedBenchmark],
    max_prompts: int,
    max_responses: int,
) -> str:
    """Return the page; see `write_page`."""
    sheets = (
        files("sluice.dashboard") / "static" / "dashboard.css",
        files("sluice.evaluation") / "page.css",
    )
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    policy = f"default-src 'none'; style-src {policy_source(style)}; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{_TITLE}: {', '.join(evaluation.label for evaluation in evaluations)}"),
        element("style", Markup(style)),
    )
    main = element(
        "main",
        _evaluations_table(evaluations),
        *(
            _benchmark(evaluations, benchmark, max_prompts, max_responses)
            for benchmark in benchmarks
        ),
    )
    top = element(
        "header",
        element("h1", _TITLE),
        element("nav", *map(_link, benchmarks), class_="parts", aria_label="Benchmarks"),
    )
    body = element("body", top, main)
    return f"<!doctype html>\n{element('html', head, body, lang='en').text}\n"


def _link(benchmark: ComparedBenchmark) -> Markup:
    return join_markup(element("a", benchmark.name, href=f"#{_anchor(benchmark.name)}"), " ")


def _anchor(name: str) -> str:
    return f"benchmark-{name}".replace(" ", "-")


def _table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str | Markup]], texts: int
) -> Markup:
    """Return a table; the first `texts` columns are texts, the others numbers."""
    kinds = [None if index < texts else "number" for index in range(len(columns))]
    titles = zip(columns, kinds, strict=True)
    head = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in titles))
    body = [
        element("tr", *(element("td", c, class_=k) for c, k in zip(row, kinds, strict=True)))
        for row in rows
    ]
    table = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )
    return element("div", table, class_="scroll", role="region", aria_label=caption, tabindex="0")


def _evaluations_table(evaluations: Sequence[Evaluation]) -> Markup:
    rows = []
    for number, evaluation in enumerate(evaluations, 1):
        results = evaluation.results
        sampling = {} if results is None else results.sampling
        rows.append(
            (
                str(number),
                evaluation.label,
                "has not ended" if results is None else results.model,
                ", ".join(f"{name} {value}" for name, value in sampling.items()) or "-",
                str(evaluation.samples_per_prompt),
                "-" if results is None else f"{results.seconds:,.0f}",
            )
        )
    columns = ("#", "evaluation", "model", "sampling", "responses per prompt", "seconds")
    return _table("Evaluated checkpoints", columns, rows, texts=4)


def _benchmark(
    evaluations: Sequence[Evaluation],
    benchmark: ComparedBenchmark,
    max_prompts: int,
    max_responses: int,
) -> Markup:
    shown_prompts = benchmark.prompts[:max_prompts]
    texts = [
        _shown_prompts(evaluation, benchmark.name, shown_prompts, max_responses)
        for evaluation in evaluations
    ]
    labels = [evaluation.label for evaluation in evaluations]
    preamble = _common_preamble(
        [shown_prompt.question for by_key in texts for shown_prompt in by_key.values()]
    )
    left_out = len(benchmark.prompts) - len(shown_prompts)
    order = "those that differ most first" if len(evaluations) > 1 else "in their order"
    note = (
        f"{len(shown_prompts)} prompts, {order}; each with its position and its correct responses."
    )
    if left_out:
        note += f" {left_out} more are in the evaluations' files of responses."
    return element(
        "section",
        element("h2", benchmark.name),
        _numbers_table(evaluations, benchmark),
        _metrics_table(evaluations, benchmark),
        element("h3", "Prompts and responses"),
        element("p", note, class_="hint"),
        _filter(benchmark.name, several=len(evaluations) > 1),
        *(
            _prompt_view(compared, labels, [by_key.get(compared.key) for by_key in texts], preamble)
            for compared in shown_prompts
        ),
        id=_anchor(benchmark.name),
    )


def _numbers_table(evaluations: Sequence[Evaluation], benchmark: ComparedBenchmark) -> Markup:
    sizes = sorted({k for result in benchmark.results if result for k in result.pass_at_k})
    several = len(evaluations) > 1
    columns = ["#", "evaluation", f"mean {benchmark.variable}"]
    columns += ["difference from 1"] if several else []
    columns += [f"pass@{k}" for k in sizes]
    columns += ["prompts", "without a grade", "tokens", "cut off"]
    rows = []
    for number, (evaluation, results) in enumerate(
        zip(evaluations, benchmark.results, strict=True)
    ):
        if results is None:
            continue
        difference = estimate_text(benchmark.differences[number], signed=True)
        rows.append(
            [
                str(number + 1),
                evaluation.label,
                estimate_text(results.mean),
                *([difference] if several else []),
                *(estimate_text(results.pass_at_k.get(k)) for k in sizes),
                f"{results.prompts:,}",
                f"{results.failed_samples:,}",
                f"{results.response_tokens:,.0f}",
                f"{100 * results.cut_off:.1f} %",
            ]
        )
    caption = "Means over prompts ± their standard errors; differences are within each prompt"
    return _table(caption, columns, rows, texts=2)


def _metrics_table(evaluations: Sequence[Evaluation], benchmark: ComparedBenchmark) -> Markup:
    tables = [result.metrics if result else {} for result in benchmark.results]
    names = sorted({name for metrics in tables for name in metrics})
    names.sort(key=lambda name: not name.startswith("val-core/"))
    rows = [
        (name, *(f"{metrics[name]:.4f}" if name in metrics else "-" for metrics in tables))
        for name in names
    ]
    columns = ("metric", *(evaluation.label for evaluation in evaluations))
    table = _table("As a validation in training has them", columns, rows, texts=1)
    return element("details", element("summary", "Metrics by verl's names"), table)


def _filter(name: str, *, several: bool) -> Markup:
    boxes = []
    for value, text in _FILTERS.items():
        if value == "changed" and not several:
            continue
        number = f"show-{value}-{_anchor(name)}"
        box = element(
            "input",
            type="radio",
            name=f"show-{_anchor(name)}",
            id=number,
            class_=f"show-{value}",
            checked=value == "all",
        )
        boxes.append(element("span", box, element("label", f" {text} ", for_=number)))
    return element(
        "fieldset", element("legend", "Show prompts that are"), *boxes, class_="show panel"
    )


def _shown_prompts(
    evaluation: Evaluation,
    name: str,
    compared_prompts: Sequence[ComparedPrompt],
    max_responses: int,
) -> dict[PromptKey, _ShownPrompt]:
    """Return the prompts with some responses; those that the evaluation lacks are left out."""
    have = evaluation.prompts.get(name, {})
    keys = [compared.key for compared in compared_prompts if compared.key in have]
    if not keys:
        return {}
    places = [(have[key].offset, have[key].key) for key in keys]
    stored = read_at(evaluation.files[name], places)
    prompts = (_shown_prompt(prompt, max_responses) for prompt in stored)
    return dict(zip(keys, prompts, strict=True))


@dataclass(frozen=True, slots=True)
class _ShownPrompt:
    """A prompt of one evaluation with the responses to show; texts are shortened.

    Attributes:
        samples: the responses to show, each after its number.
    """

    question: str
    ground_truth: str
    data_source: str
    num_samples: int
    num_correct: int
    samples: tuple[tuple[int, StoredSample], ...]


def _shown_prompt(prompt: StoredPrompt, max_responses: int) -> _ShownPrompt:
    """Return what the page shows of a prompt: right and wrong responses, where there are both."""
    verdicts = [_is_right(sample) for sample in prompt.samples]
    right = [index for index, verdict in enumerate(verdicts) if verdict]
    wrong = [index for index, verdict in enumerate(verdicts) if not verdict]
    num_wrong = min(len(wrong), max(max_responses // 2, max_responses - len(right)))
    chosen_indexes = sorted([*wrong[:num_wrong], *right[: max_responses - num_wrong]])
    truth = "" if prompt.ground_truth is None else str(prompt.ground_truth)
    return _ShownPrompt(
        shorten_middle(prompt.question, _MAX_CHARS),
        shorten_middle(truth, _TRUTH_CHARS),
        prompt.data_source,
        len(prompt.samples),
        len(right),
        tuple((index, _shorten(prompt.samples[index])) for index in chosen_indexes),
    )


def _common_preamble(questions: Sequence[str]) -> int:
    """Return how many characters of instructions all prompts begin with, in whole words."""
    if len(set(questions)) <= 1:
        return 0
    lowest, highest = min(questions), max(questions)  # what these share, all share
    shared = next((n for n, (a, b) in enumerate(zip(lowest, highest, strict=False)) if a != b), 0)
    return 1 + max(lowest.rfind(" ", 0, shared), lowest.rfind("\n", 0, shared))


def _prompt_view(
    compared: ComparedPrompt,
    labels: Sequence[str],
    texts: Sequence[_ShownPrompt | None],
    preamble: int,
) -> Markup:
    """Return a prompt that opens to its responses.

    Args:
        texts: its responses in each of them; ``None``: the evaluation lacks it.
        preamble: characters that all prompts begin with; the line of the prompt leaves them out.
    """
    prompt = next(shown_prompt for shown_prompt in texts if shown_prompt is not None)
    excerpt = " ".join(prompt.question[preamble:].split())[:_EXCERPT_CHARS]
    counts = [
        element(
            "span",
            "-"
            if shown_prompt is None
            else f"{shown_prompt.num_correct}/{shown_prompt.num_samples}",
        )
        for shown_prompt in texts
    ]
    summary = element(
        "summary",
        element("span", f"{compared.position}", class_="position"),
        element("span", *counts, class_="counts"),
        element("span", excerpt or "(empty prompt)", class_="excerpt"),
    )
    facts = [
        ("Ground truth", prompt.ground_truth or "-"),
        ("Data source", prompt.data_source or "-"),
    ]
    columns = [
        _column(label, shown_prompt) for label, shown_prompt in zip(labels, texts, strict=True)
    ]
    return element(
        "details",
        summary,
        element("dl", *(_fact(name, value) for name, value in facts)),
        element("pre", prompt.question),
        element("div", *columns, class_="answers"),
        class_=" ".join(["prompt", "group", *_filter_classes(compared, texts)]),
    )


def _filter_classes(compared: ComparedPrompt, texts: Sequence[_ShownPrompt | None]) -> list[str]:
    """Return the classes by which the page's filter chooses."""
    prompts = [prompt for prompt in texts if prompt is not None]
    marks = ["changed"] if compared.spread > 0 else []
    if all(prompt.num_correct == 0 for prompt in prompts):
        marks.append("wrong")
    if all(prompt.num_correct == prompt.num_samples for prompt in prompts):
        marks.append("right")
    return marks


def _column(label: str, prompt: _ShownPrompt | None) -> Markup:
    if prompt is None:
        return element("div", element("h4", label), element("p", "Not sampled.", class_="hint"))
    count = f"{prompt.num_correct} of {prompt.num_samples} right"
    if len(prompt.samples) < prompt.num_samples:
        count += f", {len(prompt.samples)} shown"
    return element(
        "div",
        element("h4", label),
        element("p", count, class_="hint"),
        *(_response(index, sample) for index, sample in prompt.samples),
    )


def _response(index: int, sample: StoredSample) -> Markup:
    details = [f"{sample.tokens:,} tokens"]
    details += [f"{sample.turns} turns"] if sample.turns > 1 else []
    details += [f"ended by {sample.finish_reason}"] if sample.finish_reason else []
    details += [
        f"{name} {_value(value)}"
        for name, value in sample.metrics.items()
        if value is not None and not (name == "score" and value == sample.reward)
    ]
    details += [f"before: {_grade_text(grade)}" for grade in sample.earlier]
    verdict = "failure" if sample.reward is None else "success" if _is_right(sample) else "score"
    head = element(
        "p",
        f"{index} · ",
        element("span", _grade_text(sample.grade), class_=verdict),
        "".join(f" · {detail}" for detail in details),
        class_="head",
    )
    return join_markup(head, element("pre", sample.response))


def _fact(name: str, value: str) -> Markup:
    return element("div", element("dt", name), element("dd", value))


def _grade_text(grade: StoredGrade) -> str:
    if grade.reward is not None:
        return f"reward {grade.reward:g}"
    return f"no score: {shorten_middle(grade.failure or 'unknown', _FAILURE_CHARS)}"


def _value(value: float | str) -> str:
    return shorten_middle(value, _VALUE_CHARS) if isinstance(value, str) else f"{value:g}"


def _is_right(sample: StoredSample) -> bool:
    score = sample.scored
    return score is not None and is_correct(score)


def _shorten(sample: StoredSample) -> StoredSample:
    return msgspec.structs.replace(sample, response=shorten_middle(sample.response, _MAX_CHARS))


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already; only this module and constants of the code make any."""

    text: str


Child = Markup | str | int


def element(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
        children: texts are escaped; what would hide or reorder text becomes visible.
        attributes: names with ``_`` for ``-``, and ``class_`` for ``class``; ``None`` and False
            leave one out, and True gives it no value.
    """
    attributes_text = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY_ELEMENTS:
        return Markup(f"<{name}{attributes_text}>")
    return Markup(f"<{name}{attributes_text}>{join_markup(*children).text}</{name}>")


def join_markup(*children: Child) -> Markup:
    """Return all of them in one."""
    return Markup(
        "".join(c.text if isinstance(c, Markup) else escape_text(str(c)) for c in children)
    )


def escape_text(text: str) -> str:
    """Return a text that a browser shows as it is."""
    return html.escape(printable(text))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape_text(str(value))}"'
