"""`sluice config`: check a run configuration, and explain its keys; nothing is started."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import UNSET
from rich.console import Console
from rich.text import Text

from sluice.cli.arguments import (
    AsJson,
    ConfigArguments,
    TrustScript,
    complete_key,
    split_arguments,
)
from sluice.cli.terminal import output_console, print_json, print_line, print_table
from sluice.config.catalogue.table import CatalogueEntry, KeyStatus, catalogue
from sluice.config.check import CheckReport, EngineReport, check_report
from sluice.config.device_split import named_split
from sluice.config.explain import explain_key, keys_of_section
from sluice.config.loading.keys import canonical, is_known, nearest_keys, other_spellings
from sluice.config.loading.loader import ReadRun, read_run
from sluice.config.memory.devices import device_kind
from sluice.config.memory.rollout import GIB, in_gib
from sluice.config.memory.shape import published_name
from sluice.config.memory.training import guessed_memory, training_layout
from sluice.config.problems import Problem, Severity, errors, shown
from sluice.config.run import RunConfig
from sluice.config.schema.data import file_list
from sluice.doctor.configuration import check_configuration, without_wrong_keys
from sluice.doctor.examination import preflight
from sluice.doctor.finding import DoctorContext, doctor_context
from sluice.doctor.machine import check_gpus
from sluice.errors import ConfigError
from sluice.launch.device_plan import launch_devices
from sluice.plan.launch_plan import (
    SMALL_BYTES,
    PlannedModel,
    is_small,
    local_model,
    planned_model,
    smallest_change,
    trainer_as_written,
)
from sluice.plan.pools import TrainerPool

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
_HEADINGS = {
    Severity.NOTE: ("Worth knowing", "bold"),
    Severity.ERROR: ("sluice cannot run this", "bold red"),
    Severity.WARNING: ("verl would refuse this; sluice runs it", "bold yellow"),
}


@dataclass(frozen=True, slots=True)
class CheckedMemory:
    """Memory of a run's devices.

    Attributes:
        engine: by formulas.
        trainer: counted by the trainer's own code; `None`: it is small, or see `why`.
        guess: bytes on a trainer's device in an update.
        why: it is not counted.
    """

    engine: EngineReport
    trainer: TrainerPool | None
    guess: float
    why: str = ""


config_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Check run configurations, and explain their keys.\n\n"
    "\b\nExample:\n  sluice config check run.yaml --device-memory 80",
)


@config_commands.command("check")
def check(
    arguments: ConfigArguments = None,
    *,
    model_config: Annotated[
        Path | None,
        typer.Option(help="config.json of the model, if model.path is not on this machine."),
    ] = None,
    device_memory: Annotated[
        float | None,
        typer.Option(min=0.1, help="Memory of one device, GiB; published models need no files."),
    ] = None,
    rules: Annotated[
        Literal["all", "here"],
        typer.Option(help="all: also what verl would refuse; here: only what sluice cannot run."),
    ] = "all",
    files: Annotated[
        bool,
        typer.Option(
            help="Whether to check files, the reward function, packages and devices here too.",
        ),
    ] = True,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration against all rules; print the resulting numbers and the memory.

    Keys that are not simply honoured are listed. The trainer's own code counts its memory, which
    takes seconds. The exit code is 1 if a rule is broken; each problem has a value that fixes it.

    \b
    Examples:
      sluice config check run.yaml
      sluice config check run_qwen2-7b.sh --no-files --device-memory 80
    """
    file, overrides = split_arguments(arguments, trust_script=trust_script)
    run = read_run(file, overrides)
    examined = doctor_context(run) if files else None
    model = _described_model(run.config.actor_rollout_ref.model.path, model_config, device_memory)
    report = check_report(
        run.config,
        run.settings,
        shape=None if model is None else model.shape,
        device_gib=device_memory,
        dataset_rows=count_rows(run.config),
        files=files,
        host_config=None if examined is None else examined.config,
    )
    memory, problems = None, list(report.problems)
    if model is not None and report.engine is not None:
        divided, keys = _divide_devices(run, examined, overrides)
        memory = check_memory(divided, model, report.engine)
        problems += _memory_problems(memory, device_memory, model, file, keys)
    report = with_preflight(replace(report, problems=tuple(problems)), run, examined)
    broken = list(report.problems) if rules == "all" else errors(report.problems)
    if as_json:
        print_json(report_as_json(report, memory, broken))
    else:
        print_report(output_console(), report, memory, broken)
    if broken:
        raise typer.Exit(1)


@config_commands.command("explain")
def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key or section, in any spelling; none: all keys.", autocompletion=complete_key
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Print the meaning, values and effect of a key; list the keys of a section, or all keys.

    \b
    Examples:
      sluice config explain actor_rollout_ref.actor.clip_ratio_high
      sluice config explain algorithm.rollout_correction
    """
    keys = list(catalogue().values()) if key is None else keys_of_section(key)
    if key is None or keys:
        if as_json:
            print_json([description_as_json(key_entry) for key_entry in keys])
        else:
            print_keys(output_console(), keys)
        return
    entry = explain_key(_intended_key(key))
    if as_json:
        print_json(description_as_json(entry))
    else:
        print_description(output_console(), entry)


def _described_model(
    path: str, model_config: Path | None, device_memory: float | None
) -> PlannedModel | None:
    """Return the model if its files are here, or if its name is known and its memory is asked for;
    to count takes up to a minute."""
    model = local_model(path, model_config)
    if model is None and device_memory is not None and published_name(path) is not None:
        return planned_model(path)
    return model


def _divide_devices(
    run: ReadRun, examined: DoctorContext | None, overrides: list[str]
) -> tuple[ReadRun, list[str]]:
    """Return the run, and overrides, with devices divided as its start here divides them."""
    if examined is None or examined.config is run.config:
        return run, overrides
    config = examined.config
    return replace(run, config=config), [*overrides, *named_split(config).overrides]


def check_memory(run: ReadRun, model: PlannedModel, engine: EngineReport) -> CheckedMemory:
    """Count the trainer's memory, unless the model is small or the configuration has wrong keys."""
    config = run.config
    guess = guessed_memory(model.shape, training_layout(config)).peak
    if run.problems:
        return CheckedMemory(engine, None, guess, "keys or values are wrong")
    if is_small(config, model.shape):
        return CheckedMemory(engine, None, guess)
    print_line(Console(stderr=True), "counting the trainer's memory, which takes 10 to 60 s")
    try:
        return CheckedMemory(engine, trainer_as_written(config, model), guess)
    except ConfigError as error:
        return CheckedMemory(engine, None, guess, str(error))


def _memory_problems(
    memory: CheckedMemory,
    device_gib: float | None,
    model: PlannedModel,
    file: Path | None,
    overrides: Sequence[str],
) -> Iterator[Problem]:
    """Yield that the trainer does not fit, with the smallest change that does."""
    trainer = memory.trainer
    if trainer is None or device_gib is None:
        return
    device = device_kind(f"{device_gib:g}GB")
    shortfall = trainer.shortfall(device)
    if shortfall is None:
        return
    print_line(Console(stderr=True), "it does not fit; looking for the smallest change that does")
    try:
        change = smallest_change(file, overrides, model, device, trainer) or ()
    except ConfigError:  # a rule says it too
        change = ()
    remedy = "" if change else "use a smaller model or larger devices, or see sluice plan"
    message = f"a trainer's device of {device_gib:g} GiB is too small: {shortfall}"
    yield Problem("", UNSET, message, remedy, overrides=change, rule="trainer-memory")


def with_preflight(
    report: CheckReport, run: ReadRun, examined: DoctorContext | None
) -> CheckReport:
    """Return the report with wrong keys and values and, of an examined machine, the preflight."""
    broken = without_wrong_keys(report.problems, run.problems)
    problems: list[Problem] = []
    if examined is not None:
        devices = launch_devices(run.config, examined.environment)
        skipped = [check_configuration]
        if devices is not None and not devices.count:  # the run starts on another host
            skipped.append(check_gpus)
            text = f"this host has no {devices.kind}: devices are checked where the run starts"
            problems.append(Problem("", UNSET, text, severity=Severity.NOTE))
        problems += preflight(examined, lambda check: check.examine not in skipped)
        if line := examined.devices.line:
            problems.append(Problem("", UNSET, line, severity=Severity.NOTE))
    notes = [problem for problem in problems if problem.severity is Severity.NOTE]
    wrong = [replace(problem, rule="keys") for problem in run.problems]
    return replace(
        report,
        problems=(*wrong, *broken, *errors(problems)),
        notes=(*without_wrong_keys(report.notes, run.problems), *notes),
    )


def _intended_key(key: str) -> str:
    """Return the key, or the only one that an unknown key can mean."""
    path = tuple(key.split("."))
    if is_known(path):
        return key
    candidates = list(
        dict.fromkeys(".".join(canonical(tuple(n.split(".")))) for n in nearest_keys(path))
    )
    # A critic is trained with few estimators; its keys repeat the actor's.
    intended = [
        candidate for candidate in candidates if not candidate.startswith("critic.")
    ] or candidates
    if len(intended) != 1:
        return key
    alternatives = f" (also {', '.join(candidates[1:])})" if len(candidates) > 1 else ""
    print_line(Console(stderr=True), f"{key}: the nearest key is {intended[0]}{alternatives}")
    return intended[0]


def count_rows(config: RunConfig) -> int | None:
    """Return how many rows an epoch has, or `None` where they cannot be read or repeats go."""
    import pyarrow.lib
    from pyarrow import parquet

    data = config.data
    files = file_list(data.train_files)
    if not files or data.deduplicate:
        return None
    try:
        rows = sum(int(parquet.read_metadata(name).num_rows) for name in files)
    except (OSError, pyarrow.lib.ArrowException):
        return None
    return min(rows, data.train_max_samples) if data.train_max_samples > 0 else rows


def print_keys(console: Console, keys: Sequence[CatalogueEntry]) -> None:
    """Print all keys, one a line."""
    print_table(
        console,
        f"{len(keys)} keys",
        ("key", "status", "default", "meaning"),
        (
            (entry.path, str(entry.status), _default_text(entry.default), entry.meaning)
            for entry in keys
        ),
    )


def print_description(console: Console, key: CatalogueEntry) -> None:
    """Print one key with everything known about it; empty lines are left out."""
    facts = [
        ("status", f"{key.status}{f': {key.instead}' if key.instead else ''}"),
        ("meaning", key.meaning),
        ("takes", f"{key.takes}{f', in {key.unit}' if key.unit else ''}"),
        ("default", "any keys may stand below" if key.is_block else _default_text(key.default)),
        ("verl's default", key.verl_default or ""),
        ("effect", key.effect),
        ("advice", key.advice),
        ("sets", ", ".join(key.targets)),
        ("also spelled", ", ".join(other_spellings(key.path))),
    ]
    console.print(Text(key.path, style="bold"), soft_wrap=True)
    for name, value in facts:
        if value:
            console.print(Text(f"  {name}: ", style="dim") + Text(value), soft_wrap=True)


def description_as_json(key: CatalogueEntry) -> dict[str, object]:
    """Return one key for machines; a default that does not exist is left out."""
    names = (
        *("path", "status", "meaning", "takes", "default", "verl_default", "unit", "effect"),
        *("advice", "instead", "targets", "is_block"),
    )
    facts = {name: getattr(key, name) for name in names} | {"spellings": other_spellings(key.path)}
    return {name: value for name, value in facts.items() if value is not UNSET}


def _default_text(value: object) -> str:
    return _DASH if value is UNSET else shown(value, longest=sys.maxsize)


def print_report(
    console: Console,
    report: CheckReport,
    memory: CheckedMemory | None,
    problems: Sequence[Problem],
) -> None:
    """Print numbers first and broken rules last, where they stay in sight."""
    print_table(
        console,
        "Numbers that follow from the batch sizes",
        ("quantity", "as verl would run it", "here", "formula"),
        (
            (
                quantity.name,
                _number_text(quantity.as_verl),
                _number_text(quantity.here),
                quantity.formula,
            )
            for quantity in report.quantities
        ),
        right=("as verl would run it", "here"),
    )
    if memory is None:
        print_line(
            console,
            "No memory estimate: no config.json of the model; give --model-config FILE, or "
            "--device-memory for a published model that sluice plan knows.\n",
        )
    else:
        _print_memory(console, memory)
    print_problems(console, (*report.notes, *problems))
    print_line(console, f"Learning rate: {report.learning_rate:g}")
    print_line(console, f"{_key_counts_text(report.keys)}{_verdict(problems)}")


def print_problems(console: Console, problems: Sequence[Problem]) -> None:
    """Print the findings by severity."""
    for severity, (heading, style) in _HEADINGS.items():
        selected = [problem for problem in problems if problem.severity is severity]
        if not selected:
            continue
        console.print(Text(f"{heading}:", style=style))
        for problem in selected:
            rule = "" if severity is Severity.NOTE else f"[{problem.rule}] "
            print_line(console, f"  - {rule}{problem.text}")
        if severity is Severity.NOTE:
            console.print()


def report_as_json(
    report: CheckReport, memory: CheckedMemory | None, problems: Sequence[Problem]
) -> dict[str, object]:
    """Return the report for machines; bytes are bytes, unknown numbers are null."""
    return {
        "violations": [_problem_as_json(problem) for problem in problems],
        "remedies": list(_all_overrides(problems)),
        "notices": [note.text for note in report.notes],
        "keys": {key: str(status) for key, status in report.keys.items()},
        "quantities": [asdict(quantity) for quantity in report.quantities],
        "learning_rate": report.learning_rate,
        "memory": None if memory is None else _memory_as_json(memory),
    }


def _problem_as_json(problem: Problem) -> dict[str, object]:
    return {
        "rule": problem.rule,
        "key": problem.key,
        "value": None if problem.value is UNSET else problem.value,
        "severity": str(problem.severity),
        "here": problem.severity is Severity.ERROR,
        "text": problem.text,
        "remedy": list(problem.overrides),
    }


def _memory_as_json(memory: CheckedMemory) -> dict[str, object]:
    tree, trainer = asdict(memory.engine), memory.trainer
    tree["rollout"] = [{"layout": "as configured", **tree["rollout"]}]
    tree["trainer"] = None
    if trainer is not None:
        parts, phases = dict(trainer.parts), dict(trainer.phases)
        tree["trainer"] = {"parts": parts, "phases": phases, "host": trainer.host}
    return {**tree, "trainer_guess": memory.guess, "trainer_not_counted": memory.why or None}


def _all_overrides(problems: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for problem in problems for text in problem.overrides))


def _key_counts_text(keys: dict[str, KeyStatus]) -> str:
    """Return how many keys were set, and how many have each status."""
    if not keys:
        return ""
    counts = Counter(keys.values())
    parts = ", ".join(f"{counts[status]} {status}" for status in KeyStatus if counts[status])
    return f"{len(keys)} {'key is' if len(keys) == 1 else 'keys are'} set: {parts}. "


def _verdict(problems: Sequence[Problem]) -> str:
    if not problems:
        return "No problems found."
    count = "1 problem found" if len(problems) == 1 else f"{len(problems)} problems found"
    overrides = _all_overrides(problems)
    return f"{count}. To fix: {' '.join(overrides)}" if overrides else f"{count}."


def _print_memory(console: Console, memory: CheckedMemory) -> None:
    engine, trainer = memory.engine, memory.trainer
    largest = max(memory.guess, engine.rollout.weights, engine.rollout.kv_of_all_sequences)
    if trainer is None and largest < SMALL_BYTES:
        count = f"{engine.parameters:,} parameters"
        print_line(
            console, f"Memory: less than {SMALL_BYTES / GIB:g} GiB on each device ({count})\n"
        )
        return
    size = "" if engine.device_bytes is None else f", devices of {engine.device_bytes / GIB:g} GiB"
    active = ""
    if engine.active_parameters != engine.parameters:
        active = f" ({engine.active_parameters / 1e9:.2f} billion active)"
    print_line(console, f"{engine.parameters / 1e9:.2f} billion parameters{active}{size}\n")
    if trainer is None:
        why = f", not counted: {memory.why}" if memory.why else ""
        print_line(console, f"A guess for each trainer device: {in_gib(memory.guess)} GiB{why}\n")
    else:
        sizes = {**trainer.parts, **trainer.phases, "host": trainer.host}
        print_table(
            console,
            "GiB on each trainer device, counted: what it holds, and peaks by phase; on the host "
            "of the first machine",
            tuple(sizes),
            [[in_gib(num_bytes) for num_bytes in sizes.values()]],
            right=tuple(sizes),
        )
    print_table(
        console,
        "Estimated GiB on each device of an engine",
        _ENGINE_COLUMNS,
        [_engine_cells(engine)],
        right=_ENGINE_COLUMNS[1:],
    )
    if engine.device_bytes is not None:
        fit = "none" if engine.smallest_tp is None else str(engine.smallest_tp)
        print_line(
            console,
            "Smallest tensor parallel size of the engine (device memory * "
            f"gpu_memory_utilization * TP > parameters * 2 bytes): {fit}\n",
        )


def _engine_cells(report: EngineReport) -> tuple[str, ...]:
    engine = report.rollout
    return (
        f"TP {report.tp}",
        in_gib(engine.weights),
        in_gib(engine.activations),
        in_gib(engine.kv_of_all_sequences),
        _DASH if engine.kv_cache is None else in_gib(engine.kv_cache),
        _number_text(engine.kv_tokens),
        _number_text(engine.longest_rows),
    )


def _number_text(number: int | None) -> str:
    return _DASH if number is None else f"{number:,}"
