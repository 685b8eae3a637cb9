"""What `sluice config check` found, as tables and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from sluice.cli.plain_table import print_table
from sluice.config.check_report import CheckReport
from sluice.config.memory.memory_report import MemoryReport
from sluice.config.memory.rollout_memory import GIB, RolloutMemory
from sluice.config.memory.training_memory import TrainingMemory
from sluice.config.violation import Violation

_TRAINER_COLUMNS = (
    "trainer",
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "update",
    "logprobs",
    "idle",
    "host",
)
_ENGINE_COLUMNS = (
    "engine",
    "weights",
    "activations",
    "KV of all sequences",
    "KV cache",
    "tokens in cache",
    "longest rows in cache",
)
_DASH = "-"


def print_report(
    console: Console, report: CheckReport, shown: Sequence[Violation], notices: Sequence[str]
) -> None:
    """Prints numbers first and broken rules last, where they stay in sight.

    Args:
        shown: the broken rules to tell.
        notices: sentences about what is set but not simply honoured.
    """
    print_table(
        console,
        "Numbers that follow from the batch sizes",
        ("quantity", "as verl would run it", "here", "formula"),
        (
            (one.name, _whole(one.as_verl), _whole(one.here), one.formula)
            for one in report.quantities
        ),
        right=("as verl would run it", "here"),
    )
    if report.memory is not None:
        _print_memory(console, report.memory)
    if notices:
        _print_list(console, Text("Worth knowing:", style="bold"), notices)
        console.print()
    for heading, here in (
        ("sluice cannot run this", True),
        ("verl would refuse this; sluice runs it", False),
    ):
        lines = [f"[{one.rule}] {one.text}" for one in shown if one.here is here]
        if lines:
            style = "bold red" if here else "bold yellow"
            _print_list(console, Text(f"{heading}:", style=style), lines)
    console.print(Text(_verdict(shown)), soft_wrap=True)


def _print_list(console: Console, heading: Text, lines: Sequence[str]) -> None:
    console.print(heading)
    for line in lines:
        console.print(Text(f"  - {line}"), soft_wrap=True)


def report_as_json(report: CheckReport, shown: Sequence[Violation]) -> dict[str, object]:
    """The report for machines; bytes are bytes, unknown numbers are null."""
    tree = asdict(report)
    tree["violations"] = [asdict(one) for one in shown]
    tree["remedies"] = list(_remedies(shown))
    if report.memory is not None:
        tree["memory"]["training"] = [
            {"layout": name, **asdict(one), "update": one.update}
            for name, one in report.memory.training
        ]
        tree["memory"]["own_training"]["update"] = report.memory.own_training.update
        tree["memory"]["rollout"] = [
            {"layout": name, **asdict(one)} for name, one in report.memory.rollout
        ]
    return tree


def _remedies(shown: Sequence[Violation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for one in shown for text in one.remedy))


def _verdict(shown: Sequence[Violation]) -> str:
    if not shown:
        return "No rule is broken."
    count = "1 rule is broken" if len(shown) == 1 else f"{len(shown)} rules are broken"
    remedies = _remedies(shown)
    return f"{count}. To mend: {' '.join(remedies)}" if remedies else f"{count}."


def _print_memory(console: Console, memory: MemoryReport) -> None:
    size = "" if memory.device_bytes is None else f", devices of {memory.device_bytes / GIB:g} GiB"
    active = ""
    if memory.active_parameters != memory.parameters:
        active = f" ({memory.active_parameters / 1e9:.2f} billion active)"
    parameters = f"{memory.parameters / 1e9:.2f} billion parameters{active}{size}"
    rows = [*memory.training, ("here", memory.own_training)]
    print_table(
        console,
        f"Estimated GiB on each trainer device: {parameters}; {memory.backend} as verl lays it "
        "out; peaks of update and logprobs, idle between updates",
        _TRAINER_COLUMNS,
        (_training_cells(name, one) for name, one in rows),
        right=_TRAINER_COLUMNS[1:],
    )
    print_table(
        console,
        "Estimated GiB on each device of an engine",
        _ENGINE_COLUMNS,
        (_engine_cells(name, one) for name, one in memory.rollout),
        right=_ENGINE_COLUMNS[1:],
    )
    if memory.device_bytes is not None:
        fit = "none" if memory.smallest_tp is None else str(memory.smallest_tp)
        console.print(
            Text(
                "Smallest tensor parallel size of the engine (device memory * "
                f"gpu_memory_utilization * TP > parameters * 2 bytes): {fit}"
            ),
            soft_wrap=True,
        )
        console.print()


def _training_cells(name: str, one: TrainingMemory) -> tuple[str, ...]:
    held = (one.parameters, one.gradients, one.optimizer, one.gathered, one.activations, one.logits)
    return (name, *map(_gib, (*held, one.update, one.log_prob, one.idle, one.host)))


def _engine_cells(name: str, one: RolloutMemory) -> tuple[str, ...]:
    return (
        name,
        _gib(one.weights),
        _gib(one.activations),
        _gib(one.kv_of_all_sequences),
        _DASH if one.kv_cache is None else _gib(one.kv_cache),
        _whole(one.kv_tokens),
        _whole(one.longest_rows),
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _whole(number: int | None) -> str:
    return _DASH if number is None else f"{number:,}"
