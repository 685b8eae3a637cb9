"""The page of evaluations: numbers, and responses to the same prompts beside each other.

One file without scripts: it needs no server and no network. Responses are hostile text; all of it
is escaped, and the page's policy admits nothing but its own style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from sluice.dashboard.page import policy_source
from sluice.evaluation.comparison import (
    ComparedBenchmark,
    ComparedPrompt,
    Evaluation,
    PromptKey,
    compared_benchmarks,
    read_evaluations,
)
from sluice.evaluation.markup import Markup, element, joined
from sluice.evaluation.prompt_view import (
    ShownPrompt,
    common_preamble,
    prompt_view,
    shown_prompt,
)
from sluice.evaluation.statistics import estimate_text
from sluice.evaluation.stored_responses import read_at
from sluice.whole_file import write_whole

PAGE_NAME = "report.html"
USUAL_PROMPTS, USUAL_RESPONSES = 100, 4
_FILTERS = {"all": "all", "changed": "changed", "wrong": "never right", "right": "always right"}
_TITLE = "Evaluation"


def write_report(folder: Path) -> None:
    """Write the page of one evaluation into its folder; errors as `write_page`."""
    write_page(read_evaluations([folder]), folder / PAGE_NAME)


def write_page(
    evaluations: Sequence[Evaluation],
    file: Path,
    *,
    most_prompts: int = USUAL_PROMPTS,
    most_responses: int = USUAL_RESPONSES,
) -> None:
    """Write the page of some evaluations. The same evaluations give the same bytes.

    Args:
        evaluations: read before; differences are from the first one.
        file: the file to write; others see the former one or the new one.
        most_prompts: prompts of each benchmark with responses, those that differ most first.
        most_responses: of each prompt and evaluation.

    Raises:
        DataError: a file of responses was damaged since.
        OSError: a file cannot be read or written.
    """
    benchmarks = compared_benchmarks(evaluations)
    content = page_of(evaluations, benchmarks, most_prompts, max(1, most_responses))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content.encode())


def page_of(
    evaluations: Sequence[Evaluation],
    benchmarks: Sequence[ComparedBenchmark],
    most_prompts: int,
    most_responses: int,
) -> str:
    """Return the page; see `write_page`."""
    styles = files("sluice.dashboard") / "static" / "dashboard.css"
    style = styles.read_text(encoding="utf-8") + _read_own_style()
    policy = f"default-src 'none'; style-src {policy_source(style)}; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{_TITLE}: {', '.join(one.label for one in evaluations)}"),
        element("style", Markup(style)),
    )
    main = element(
        "main",
        _evaluations_table(evaluations),
        *(_benchmark(evaluations, each, most_prompts, most_responses) for each in benchmarks),
    )
    top = element(
        "header",
        element("h1", _TITLE),
        element("nav", *map(_link, benchmarks), class_="parts", aria_label="Benchmarks"),
    )
    body = element("body", top, main)
    return f"<!doctype html>\n{element('html', head, body, lang='en').text}\n"


def _read_own_style() -> str:
    return (files("sluice.evaluation") / "page.css").read_text(encoding="utf-8")


def _link(benchmark: ComparedBenchmark) -> Markup:
    return joined(element("a", benchmark.name, href=f"#{_anchor(benchmark.name)}"), " ")


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
    for number, one in enumerate(evaluations, 1):
        results = one.results
        sampling = {} if results is None else results.sampling
        rows.append(
            (
                str(number),
                one.label,
                "has not ended" if results is None else results.model,
                ", ".join(f"{name} {value}" for name, value in sampling.items()) or "-",
                str(one.samples_per_prompt),
                "-" if results is None else f"{results.seconds:,.0f}",
            )
        )
    columns = ("#", "evaluation", "model", "sampling", "responses per prompt", "seconds")
    return _table("Evaluated checkpoints", columns, rows, texts=4)


def _benchmark(
    evaluations: Sequence[Evaluation],
    benchmark: ComparedBenchmark,
    most_prompts: int,
    most_responses: int,
) -> Markup:
    shown = benchmark.prompts[:most_prompts]
    texts = [_texts(one, benchmark.name, shown, most_responses) for one in evaluations]
    labels = [one.label for one in evaluations]
    preamble = common_preamble([one.question for found in texts for one in found.values()])
    left_out = len(benchmark.prompts) - len(shown)
    order = "those that differ most first" if len(evaluations) > 1 else "in their order"
    note = f"{len(shown)} prompts, {order}; each with its position and its correct responses."
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
            prompt_view(one, labels, [found.get(one.key) for found in texts], preamble)
            for one in shown
        ),
        id=_anchor(benchmark.name),
    )


def _numbers_table(evaluations: Sequence[Evaluation], benchmark: ComparedBenchmark) -> Markup:
    sizes = sorted({k for one in benchmark.results if one for k in one.pass_at_k})
    several = len(evaluations) > 1
    columns = ["#", "evaluation", f"mean {benchmark.variable}"]
    columns += ["difference from 1"] if several else []
    columns += [f"pass@{k}" for k in sizes]
    columns += ["prompts", "without a grade", "tokens", "cut off"]
    rows = []
    for number, (one, found) in enumerate(zip(evaluations, benchmark.results, strict=True)):
        if found is None:
            continue
        difference = estimate_text(benchmark.differences[number], signed=True)
        rows.append(
            [
                str(number + 1),
                one.label,
                estimate_text(found.mean),
                *([difference] if several else []),
                *(estimate_text(found.pass_at_k.get(k)) for k in sizes),
                f"{found.prompts:,}",
                f"{found.failed_samples:,}",
                f"{found.response_tokens:,.0f}",
                f"{100 * found.cut_off:.1f} %",
            ]
        )
    caption = "Means over prompts ± their standard errors; differences are within each prompt"
    return _table(caption, columns, rows, texts=2)


def _metrics_table(evaluations: Sequence[Evaluation], benchmark: ComparedBenchmark) -> Markup:
    found = [one.metrics if one else {} for one in benchmark.results]
    names = sorted({name for metrics in found for name in metrics})
    names.sort(key=lambda name: not name.startswith("val-core/"))
    rows = [
        (name, *(f"{metrics[name]:.4f}" if name in metrics else "-" for metrics in found))
        for name in names
    ]
    columns = ("metric", *(one.label for one in evaluations))
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


def _texts(
    evaluation: Evaluation, name: str, shown: Sequence[ComparedPrompt], most_responses: int
) -> dict[PromptKey, ShownPrompt]:
    """Return the prompts with some responses; those that the evaluation lacks are left out."""
    have = evaluation.prompts.get(name, {})
    keys = [one.key for one in shown if one.key in have]
    if not keys:
        return {}
    found = read_at(evaluation.files[name], [have[key].offset for key in keys])
    prompts = (shown_prompt(prompt, most_responses) for prompt in found)
    return dict(zip(keys, prompts, strict=True))
