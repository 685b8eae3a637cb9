"""`sluice eval`: grade the policy in training, or a model's files without a run; below it `compare`
and `regrade`, for what evaluations stored.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer.core import TyperCommand
from typer.main import get_command

from sluice.cli.arguments import (
    RUN_VARIABLE,
    RUNS,
    AsJson,
    RunOption,
    complete_run,
    complete_setting,
    named_run,
    summary,
)
from sluice.cli.policy.evaluate_follow import EVALUATIONS_NAME, follow_run, steps_with
from sluice.cli.run.checked import refuse_beside_another
from sluice.cli.run.evaluation import EvaluationOrder, default_output, evaluate_model
from sluice.cli.run.evaluation_origin import regraded_origin, write_origin
from sluice.cli.run.up import Display, ShowLogs, display_from_options
from sluice.cli.running_run import ask_run, is_active
from sluice.cli.terminal import output_console, print_json, print_table, show_count
from sluice.client.run_address import locate_run
from sluice.client.run_monitor import RunMonitor
from sluice.concurrency.process import SUPERVISOR_VARIABLE, ending_text, until_signal
from sluice.config.schema.actor_rollout_ref import EngineName
from sluice.data.benchmarks import benchmark_files
from sluice.errors import ConfigError, DataError, NotReadyError
from sluice.evaluation.comparison import (
    ComparedBenchmark,
    Evaluation,
    compare_benchmarks,
    comparison_object,
    read_evaluations,
)
from sluice.evaluation.page import (
    PAGE_NAME,
    USUAL_PROMPTS,
    USUAL_RESPONSES,
    write_page,
    write_report,
)
from sluice.evaluation.results import RESULTS_NAME, Results, read_results, write_results
from sluice.evaluation.statistics import estimate_text
from sluice.evaluation.stored_responses import FOLDER_NAME
from sluice.safe_text import printable
from sluice.service_contract import CONFIG_NAME

_EXIT_INTERRUPTED = 130
_STEP_ENDS_S = 600.0
_MODEL_ONLY = "With --model or --follow:"
_DATA = Path("data")


_Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] [KEY=VALUE]...",
        help=f"Folder of a run (default: ${RUN_VARIABLE}, else the newest in {RUNS}/); with "
        "--model keys to override, in verl's spelling.",
        show_default=False,
        autocompletion=complete_setting,
    ),
]
_Number = Annotated[int | None, typer.Option("-n", min=1, help="Responses per prompt.")]
_Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
_Wait = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="For an active run: seconds to wait for the end of its current step.",
        show_default="600",
    ),
]
_Model = Annotated[
    Path | None,
    typer.Option(help="Model or checkpoint to evaluate without a run.", show_default=False),
]
_Follow = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Evaluate each checkpoint of this run as it appears.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
_Benchmark = Annotated[
    str | None,
    typer.Option(
        help=f"{_MODEL_ONLY} prepared sets and files of rows, separated by commas.",
        show_default=False,
    ),
]
_DataDir = Annotated[
    Path | None,
    typer.Option(
        help=f"{_MODEL_ONLY} folder of the prepared sets. Default: {_DATA}.", show_default=False
    ),
]
_Engine = Annotated[EngineName | None, typer.Option(help=f"{_MODEL_ONLY} what samples.")]
_Replicas = Annotated[int | None, typer.Option(min=1, help=f"{_MODEL_ONLY} engines at once.")]
_Output = Annotated[
    Path | None,
    typer.Option(
        help=f"{_MODEL_ONLY} folder for responses and results; an unfinished evaluation in it "
        "continues. Default: evals/MODEL.",
        show_default=False,
    ),
]
_Config = Annotated[
    Path | None,
    typer.Option(
        help=f"{_MODEL_ONLY} a run's YAML file, for scorers, sampling, lengths, environment.",
        show_default=False,
    ),
]

_OF_FILES = ("benchmark", "data-dir", "engine", "replicas", "output", "config", "logs")
"""Options of evaluations without a run."""
Evaluations = Annotated[
    list[Path],
    typer.Argument(metavar="DIR", help="--output folders of evaluations, or of --follow."),
]
_COMMAND = "services.reward.regrade"


def evaluate(  # noqa: PLR0913 - options of the command
    arguments: _Arguments = None,
    *,
    run_option: RunOption = None,
    n: _Number = None,
    temperature: _Temperature = None,
    wait: _Wait = None,
    model: _Model = None,
    follow: _Follow = None,
    benchmark: _Benchmark = None,
    data_dir: _DataDir = None,
    engine: _Engine = None,
    replicas: _Replicas = None,
    output: _Output = None,
    config: _Config = None,
    logs: ShowLogs = False,
    as_json: AsJson = False,
) -> None:
    """Validate the current policy of a running run, or evaluate a model without a run.

    A run pauses after its current step and continues afterwards, unless another command holds
    it too: all numbers are of one policy version. Without options its own validation settings
    apply.

    With --model, replicas and a reward service start, sample and grade the benchmarks as a run's
    validation does, and end. After a kill of any process the same command continues. --follow does
    so for each checkpoint of a run, with its settings, until the run has ended.

    \b
    Examples:
      sluice eval runs/quickstart -n 4 --temperature 0.7
      sluice eval --model models/mine --benchmark math-500,mine.parquet -n 4 --engine vllm
      sluice eval --follow runs/mine --benchmark math-500 -n 4
    """
    subject = model or follow
    if subject is None:
        options = (benchmark, data_dir, engine, replicas, output, config, logs or None)
        _refuse_options(dict(zip(_OF_FILES, options, strict=True)), "needs --model or --follow")
        run, wait_s = _named_run(arguments, run_option), _STEP_ENDS_S if wait is None else wait
        _evaluate_run(run, n, temperature, wait_s, as_json=as_json)
        return
    why = "is for the policy of a running run; leave it out, or --model"
    _refuse_options({"run": run_option, "wait": wait}, why)
    _check_subject(model, follow, benchmark)
    order = EvaluationOrder(
        model=subject,
        benchmarks={} if benchmark is None else benchmark_files(benchmark, data_dir or _DATA),
        output=output or (follow / EVALUATIONS_NAME if follow else default_output(subject)),
        config=config,
        overrides=arguments or [],
        samples_per_prompt=n,
        temperature=temperature,
        engine=engine,
        replicas=replicas,
    )
    work = _evaluate_files if follow is None else partial(follow_run, follow)
    work(order, display_from_options(logs=logs, quiet=False, as_json=as_json))


def _refuse_options(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} {why}")


def _check_subject(model: Path | None, follow: Path | None, benchmark: str | None) -> None:
    if model and follow:
        raise ConfigError("--model and --follow both name what to evaluate; leave one out")
    if model is not None and benchmark is None:
        raise ConfigError("--model needs --benchmark: one or more, such as math-500,mine.parquet")


def _named_run(arguments: list[str] | None, option: Path | None) -> Path:
    argument, *further = arguments or [""]
    if further or "=" in argument:
        stray = further[0] if further else argument
        raise ConfigError(
            f"{stray}: is for an evaluation without a run; add --model DIR or --follow RUN"
        )
    return named_run(Path(argument) if argument else None, option)


def _evaluate_run(
    run: Path, n: int | None, temperature: float | None, wait_s: float, *, as_json: bool
) -> None:
    evaluated = asyncio.run(until_signal(_evaluate(run, n, temperature, wait_s)))
    if evaluated is None:
        typer.echo("interrupted; the run continues", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED)
    step, metrics = evaluated
    if as_json:
        print_json({"step": step, "metrics": dict(metrics)})
        return
    typer.echo(f"policy after step {step}")
    _print_metrics(metrics)


def _evaluate_files(order: EvaluationOrder, display: Display) -> None:
    results = evaluate_model(order, display)
    if display.as_json:
        print_json(msgspec.to_builtins(results, str_keys=True))
        return
    for name, benchmark in results.benchmarks.items():
        parts = [
            f"{benchmark.prompts} prompts",
            f"mean {benchmark.variable} {estimate_text(benchmark.mean)}",
        ]
        passes = max(benchmark.pass_at_k, default=1)
        if passes > 1:
            parts.append(f"pass@{passes} {estimate_text(benchmark.pass_at_k[passes])}")
        if benchmark.failed_samples:
            parts.append(f"{benchmark.failed_samples} samples without a grade")
        typer.echo(f"{name}: {', '.join(parts)}")
        _print_metrics(benchmark.metrics)


def _print_metrics(metrics: Mapping[str, float]) -> None:
    """Print metrics; those that verl calls core come first."""
    by_rank = sorted(metrics.items(), key=lambda item: ("val-core/" not in item[0], item[0]))
    for name, value in by_rank:
        typer.echo(f"{name}: {value:.4f}")


async def _evaluate(
    run: Path, n: int | None, temperature: float | None, wait_s: float
) -> tuple[int, Mapping[str, float]]:
    try:
        location, _ = await ask_run(run)
    except NotReadyError as error:
        if await is_active(locate_run(run).run_dir):  # it will answer
            raise
        remedy = (
            "\nEvaluate one of its checkpoints: sluice eval --model CHECKPOINT --benchmark FILE"
        )
        raise NotReadyError(f"{error}{remedy}") from error
    monitor = RunMonitor.of(location)
    async with monitor, monitor.held(wait_s) as hold:
        if hold.version is None:
            raise NotReadyError("no policy version was published yet; try again in a moment")
        return hold.step, await monitor.evaluate(hold.version, n=n, temperature=temperature)


def compare_evaluations(
    folders: Evaluations,
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page with responses here.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of a benchmark with responses on the page.")
    ] = USUAL_PROMPTS,
    responses: Annotated[
        int, typer.Option(min=1, help="Responses of a prompt on the page, for each evaluation.")
    ] = USUAL_RESPONSES,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations: means, pass@k and differences, each with its standard error.

    Differences are from the first evaluation, over the prompts that both have. The page shows the
    responses to a prompt beside each other, prompts that differ most first; it is one file without
    scripts. An evaluation that still runs is compared as far as it got.

    \b
    Examples:
      sluice eval compare runs/base-eval runs/trained-eval
      sluice eval compare runs/one/evaluations --output curve.html
    """
    evaluations = read_evaluations(
        [evaluation_folder for folder in folders for evaluation_folder in _expand_folder(folder)]
    )
    benchmarks = compare_benchmarks(evaluations)
    if output is not None:
        write_page(evaluations, output, max_prompts=prompts, max_responses=responses)
    if as_json:
        comparison = comparison_object(evaluations, benchmarks)
        print_json(comparison | ({} if output is None else {"page": str(output)}))
        return
    console = output_console()
    for benchmark in benchmarks:
        _print_benchmark(console, evaluations, benchmark)
    if output is not None:
        typer.echo(f"page: {output}")


def _expand_folder(folder: Path) -> list[Path]:
    """Return the evaluations in a folder of `sluice eval --follow`, the first step first."""
    if folder.is_file():
        raise DataError(f"{folder}: is a file; give {folder.parent} for all evaluations in it")
    steps = steps_with(folder, FOLDER_NAME)
    return [folder / f"global_step_{step}" for step in steps] or [folder]


def _print_benchmark(
    console: Console, evaluations: Sequence[Evaluation], benchmark: ComparedBenchmark
) -> None:
    largest = max(
        (k for result in benchmark.results if result for k in result.pass_at_k), default=1
    )
    mean, passes = f"mean {benchmark.variable}", f"pass@{largest}"
    columns = ["evaluation", mean, "difference", passes, "prompts", "without a grade"]
    rows = []
    for number, (evaluation, results) in enumerate(
        zip(evaluations, benchmark.results, strict=True)
    ):
        if results is not None:
            state = "" if evaluation.results is not None else " (has not ended)"
            rows.append(
                (
                    printable(evaluation.label) + state,
                    estimate_text(results.mean),
                    estimate_text(benchmark.differences[number], signed=True),
                    estimate_text(results.pass_at_k.get(largest)),
                    f"{results.prompts:,}",
                    f"{results.failed_samples:,}",
                )
            )
    print_table(console, printable(benchmark.name), columns, rows, right=columns[1:])


def regrade(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="--output folder of an evaluation.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys to override, such as reward.custom_reward_function.path=other.py.",
            show_default=False,
            autocompletion=complete_setting,
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Grade the stored responses of an evaluation again: nothing is sampled.

    The scorers are those of the evaluation's configuration, in processes with its limits; override
    keys to try others. What an environment graded stays as it is. results.json and the page are
    written again. Each response keeps its earlier grades, and the former results stay as
    results-1.json, results-2.json and so on. An evaluation that failed is graded again, too; its
    command then finishes it.

    \b
    Examples:
      sluice eval regrade runs/base-eval
      sluice eval regrade runs/base-eval reward.custom_reward_function.path=other.py
    """
    if not (folder / CONFIG_NAME).is_file():
        raise DataError(
            f"{folder}: holds no {CONFIG_NAME}; give the --output folder of an evaluation"
        )
    asyncio.run(refuse_beside_another(folder))
    before = read_results(folder) if (folder / RESULTS_NAME).is_file() else None
    origin = regraded_origin(folder, settings or [])
    total = (
        None
        if before is None
        else sum(benchmark.prompts for benchmark in before.benchmarks.values())
    )
    _grade(folder, settings or [], total)
    if origin is not None:
        write_origin(folder, origin)
    if before is None:
        _print_unfinished(as_json=as_json)
        return
    former_results = _keep_former_results(folder)
    after = write_results(folder, before)
    write_report(folder)
    if as_json:
        before_and_now = {"before": before, "now": after}
        print_json(
            msgspec.to_builtins(before_and_now, str_keys=True) | {"former": str(former_results)}
        )
        return
    _print_change(before, after)
    typer.echo(f"results: {folder / RESULTS_NAME} (former ones: {former_results.name})")
    typer.echo(f"page: {folder / PAGE_NAME}")


def _print_unfinished(*, as_json: bool) -> None:
    if as_json:
        print_json({"before": None, "now": None, "former": None})
    else:
        typer.echo("graded again; the evaluation's command, with these keys, finishes it")


def _grade(folder: Path, settings: Sequence[str], num_prompts: int | None) -> None:
    """Run the reward service's code in a process that ends with this one, and count its prompts.

    Raises:
        ConfigError: it failed; it has printed why.
    """
    command = [sys.executable, "-m", _COMMAND, str(folder), *settings]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    with (
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process,
        show_count("prompts graded again", num_prompts) as advance,
    ):
        try:
            for line in process.stdout or ():
                advance(int(line))
        except BaseException:
            process.kill()
            raise
    if process.returncode > 0:
        raise typer.Exit(process.returncode)
    if process.returncode < 0:
        raise ConfigError(
            f"grading {folder}: its process ended with {ending_text(process.returncode)}; look "
            "whether this machine has the memory for it, and try again"
        )


def _keep_former_results(folder: Path) -> Path:
    """Keep the former results under the next free name."""
    former, number = folder / RESULTS_NAME, 1
    while (target := folder / f"results-{number}.json").exists():
        number += 1
    copyfile(former, target)
    return target


def _print_change(before: Results, after: Results) -> None:
    for name, results in after.benchmarks.items():
        former = before.benchmarks.get(name)
        text = f"{name}: mean {results.variable} {estimate_text(results.mean)}"
        if former is not None:
            text += f", before {estimate_text(former.mean)}"
        failed = results.failed_samples
        typer.echo(printable(text + (f"; {failed} without a grade" if failed else "")))


_below = typer.Typer(rich_markup_mode=None, add_completion=False)
_below.command("compare")(compare_evaluations)
_below.command("regrade")(regrade)


class EvaluateCommand(TyperCommand):
    """`sluice eval RUN`, or one of its commands if the first word names one.

    A run in a folder of such a name is ``--run compare``, or ``./compare``.
    """

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - typer's arguments
        super().__init__(*given, **named)
        self.commands = get_command(_below).commands  # type: ignore[attr-defined]

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:  # noqa: ANN401 - private types
        """Return the context of the command that the arguments mean."""
        if args and args[0] in self.commands:
            return self.commands[args[0]].make_context(
                f"{info_name} {args[0]}", args[1:], parent, **extra
            )
        return super().make_context(info_name, args, parent, **extra)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - private types
        """List the commands below."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, summary(command.help or "")) for name, command in self.commands.items()]
            )
        super().format_epilog(ctx, formatter)
