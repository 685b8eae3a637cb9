"""One self-contained page about a finished run: numbers, curves, samples before and after."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.errors import ConfigError
from sluice.report.run_record import RunRecord, read_run
from sluice.report.summary import RunSummary, account_views

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SIZE_INCHES = (5.6, 3.0)
_STYLE: dict[Any, object] = {
    "svg.fonttype": "none",  # text stays text: smaller, and read out by screen readers
    "svg.hashsalt": "sluice",  # the same run gives the same bytes
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}


def figure_svg(draw: Callable[[Axes], None]) -> str:
    """Draws on one pair of axes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("reports need matplotlib; install sluice[train]") from error
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


# The run's curves, each with the words that say what it shows.
#
# Colours are of the Okabe-Ito palette, which colour-blind people can tell apart; lines and
# hatches differ as well.

_BLUE, _ORANGE, _GREEN, _GREY, _PURPLE = "#0072B2", "#E69F00", "#009E73", "#999999", "#CC79A7"
# Metrics that add up to one part of the column, label, colour, hatch.
_COMPOSITION = (
    (("kept",), "kept (mixed)", _ORANGE, ""),
    (("all_right",), "all right", _GREEN, "///"),
    (("all_wrong",), "all wrong", _BLUE, "..."),
    (("uniform", "stale", "failed"), "other", _GREY, "xx"),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """`svg` is drawn by us and safe to put into a page as it stands."""

    title: str
    caption: str
    svg: str


def charts(record: RunRecord) -> tuple[Chart, ...]:
    """All charts of the report, in order.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plan: tuple[tuple[str, str, Callable[[RunRecord, Axes], None]], ...] = (
        (
            "Held-out accuracy",
            "Share of right responses to problems that are never trained on. Step 0 is the model "
            "before DAPO.",
            _draw_accuracy,
        ),
        (
            "Reward while training",
            "Mean reward of the trained groups alone. Groups that are all right or all wrong are "
            "left out, so it says little about progress.",
            _draw_reward,
        ),
        (
            "What the sampled groups were",
            "Only kept groups carry a gradient; the rest is filtered out before training.",
            _draw_composition,
        ),
        (
            "Response tokens",
            "Summed up over the run. The gap is the price of the filter. Validation is not "
            "counted, nor is what was under way at the end.",
            _draw_tokens,
        ),
        (
            "Where the trainer's time went",
            "Seconds of rank 0 from the start of its process to its end.",
            _draw_time,
        ),
        (
            "Idle shares",
            "Share of each step that the trainer waited for a batch, and that replicas had "
            "nothing to generate.",
            _draw_idle,
        ),
    )
    return tuple(
        Chart(title, caption, figure_svg(partial(draw, record))) for title, caption, draw in plan
    )


def _draw_accuracy(record: RunRecord, axes: Axes) -> None:
    points = record.accuracies()
    axes.plot(
        [p.step for p in points], [p.accuracy for p in points], "o-", color=_BLUE, clip_on=False
    )
    for point in {points[0], points[-1]} if points else ():
        axes.annotate(
            f"{point.accuracy:.3f}",
            (point.step, point.accuracy),
            xytext=(8, -6) if point is points[0] else (0, 8 if point.accuracy < 0.9 else -16),
            textcoords="offset points",
            ha="left" if point is points[0] else "right",
        )
    axes.set_ylim(0, 1)
    _label_steps(axes, "accuracy (0 to 1)")


def _draw_reward(record: RunRecord, axes: Axes) -> None:
    axes.plot(*_series(record, "critic/rewards/mean"), color=_PURPLE)
    _label_steps(axes, "mean reward")


def _draw_composition(record: RunRecord, axes: Axes) -> None:
    steps = _steps(record)
    base = [0.0] * len(steps)
    for kinds, label, colour, hatch in _COMPOSITION:
        counts = [
            sum(row.get(f"train/groups_{kind}") or 0.0 for kind in kinds) for row in record.steps
        ]
        if not any(counts) and label == "other":
            continue
        axes.bar(
            steps,
            counts,
            bottom=base,
            width=0.9,
            label=label,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        base = [low + count for low, count in zip(base, counts, strict=True)]
    axes.set_ylim(0, max(base, default=1.0) * 1.25 or 1.0)
    axes.legend(loc="upper left", ncols=4, handlelength=1.2, columnspacing=1.0)
    _label_steps(axes, "groups")


def _draw_tokens(record: RunRecord, axes: Axes) -> None:
    for name, colour, line in (("generated", _ORANGE, "--"), ("trained", _BLUE, "-")):
        steps, values = _series(record, f"train/{name}_tokens")
        known = (0.0 if math.isnan(value) else value / 1e6 for value in values)
        axes.plot(steps, list(itertools.accumulate(known)), line, color=colour, label=name)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    _label_steps(axes, "million tokens")


def _draw_time(record: RunRecord, axes: Axes) -> None:
    phases = {
        name.removeprefix("trainer_s/").replace("_", " "): seconds
        for name, seconds in record.accounts.items()
        if name.startswith("trainer_s/") and seconds > 0
    }
    ordered = sorted(phases.items(), key=lambda phase: phase[1])
    whole = sum(phases.values()) or 1.0
    bars = axes.barh([name for name, _ in ordered], [s for _, s in ordered], color=_BLUE)
    axes.bar_label(bars, [f"{s:.1f} s, {s / whole:.0%}" for _, s in ordered], padding=3)
    axes.set_xlim(0, max(phases.values(), default=1.0) * 1.3)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")


def _draw_idle(record: RunRecord, axes: Axes) -> None:
    for name, colour, line in (("trainer", _BLUE, "-"), ("rollout", _ORANGE, "--")):
        axes.plot(*_series(record, f"{name}/idle_share"), line, color=colour, label=name)
    axes.set_ylim(0, 1)
    axes.legend(loc="upper right", ncols=2)
    _label_steps(axes, "share of the step (0 to 1)")


def _label_steps(axes: Axes, quantity: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    axes.set_ylabel(quantity)


def _steps(record: RunRecord) -> list[int]:
    return [int(row["step"] or 0) for row in record.steps]


def _series(record: RunRecord, name: str) -> tuple[list[int], Sequence[float]]:
    """Steps and one metric's values; a step without it leaves a gap."""
    values = (row.get(name) for row in record.steps)
    return _steps(record), [math.nan if value is None else value for value in values]


_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class SamplePair:
    """Responses to one prompt by two versions; rows of the validation files."""

    prompt: str
    answer: str
    before: Mapping[str, object]
    after: Mapping[str, object]


def write_report(run_dir: Path, summary: RunSummary, file: Path) -> None:
    """Writes the page; it needs no network to be looked at and runs no script.

    Raises:
        DataError: the run did not reach its end.
        ConfigError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("reports need jinja2; install sluice[train]") from error
    record = read_run(run_dir)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        (files("sluice.report") / "report.html.jinja").read_text(encoding="utf-8")
    )
    page = template.render(
        name=run_dir.absolute().name,
        summary=summary,
        charts=charts(record),
        validation=_validation(record),
        samples=sample_pairs(run_dir, record),
        accounting=account_views(record.accounts),
    )
    file.write_text(page, encoding="utf-8")


def _validation(record: RunRecord) -> Mapping[str, int]:
    """First and last validated step, and the prompts of the validation set."""
    points = record.accuracies()
    rows = [row.get("val-aux/num_prompts") for row in record.validations]
    return {"first": points[0].step, "last": points[-1].step, "prompts": int(rows[-1] or 0)}


def sample_pairs(run_dir: Path, record: RunRecord) -> Sequence[SamplePair]:
    """Responses to the first prompts of the set by the first and the last validated version."""
    points = record.accuracies()
    steps = points[0].step, points[-1].step
    paths = [run_dir / "validation" / f"{step}.jsonl" for step in steps]
    if steps[0] == steps[1] or not all(path.is_file() for path in paths):
        return []
    before, after = map(_by_prompt, paths)
    shared = [prompt for prompt in before if prompt in after]
    return [
        SamplePair(prompt, str(before[prompt]["gts"]), before[prompt], after[prompt])
        for prompt in shared[:_NUM_SAMPLES]
    ]


def _by_prompt(file: Path) -> dict[str, Mapping[str, object]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    return {str(row["input"]): row for row in rows}
