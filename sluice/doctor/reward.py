"""Try what grades responses and plays episodes: load it, and grade the first rows once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sluice.algorithm.groups.filter import metric_value
from sluice.concurrency.answers import ask_module
from sluice.config.derived import may_grade_itself
from sluice.config.run import RunConfig
from sluice.config.schema.algorithm import FilterGroupsConfig
from sluice.config.sources import prompt_files
from sluice.data.prompt_rows import PromptRow
from sluice.data.scoring import DEFAULT_ROUTES, PROGRAM_TESTS, ScorerInput, scorer_name
from sluice.doctor.finding import DoctorContext, Finding, fine, problem, problem_of_text, warning
from sluice.doctor.trial import ScorerTrial, TrialAnswer
from sluice.environment.source import EnvironmentSource
from sluice.errors import ConfigError, DataError, SluiceError
from sluice.sandbox.choice import backend_of
from sluice.types import Scored

_GRADE, _LOAD = "services.reward.scorer_check", "sluice.environment.source"
ENOUGH_S = 20.0  # a row after this is not graded any more
_TRIAL_S = 70.0  # above the deadline of loading, and of the row in work
ROWS_OF_A_SOURCE, ROWS_LOOKED_AT = 4, 16
_LOADING_S = 60.0  # of an environment
_LONGEST_TRUTH = 200
_REFUSED = "the run refuses to start"
_WRONG_RESPONSE = "I do not know."
_LEFT_OUT = "such a sample is left out of its group, and never counts as wrong"
_ALWAYS_A_NUMBER = "let it return a number for every response"
_REPAIR = "repair it; a response that is wrong or has another form deserves a number, such as 0.0"
_OTHER_TRUTH = "correct the ground truth, or choose another scorer in reward.scorer_routes"
BUILT_IN = "the built-in scorer"
_OVERLONG_METRICS = ("overlong", "overlong_reward")  # the reward manager adds them


def check_reward(context: DoctorContext) -> Iterator[Finding]:
    """Grade a made-up response to each of the first rows, and a wrong one to the first, in scorer
    processes with their limits."""
    reward = context.config.reward
    function, model = reward.custom_reward_function, reward.reward_model
    if function.path is None and model.enable:
        yield fine(f"graded by the model at {model.base_url}")  # which may not serve yet
        return
    rows = _trial_rows(context)
    pairs = [(row, made_up_response(row)) for row in rows]
    pairs += [(row, _WRONG_RESPONSE) for row in rows[:1]]
    try:
        answers, _ = try_responses(context.config, pairs, ENOUGH_S)
    except SluiceError as error:
        yield problem_of_text(str(error), _REFUSED)
        return
    scorer = f"{function.path}: {function.name}" if function.path else BUILT_IN
    yield trial_finding(scorer, [row.place for row in rows], answers[: len(rows)])
    yield from wrong_response_findings(scorer, answers[:1], answers[len(rows) :])
    if function.path is not None and not may_grade_itself(context.config):
        yield from metric_findings(context.config.algorithm.filter_groups, answers)


def trial_finding(scorer: str, places: Sequence[str], answers: Sequence[TrialAnswer]) -> Finding:
    """Judge the outcomes of the rows at `places`: a problem if none of them has a score."""
    failed = [
        (place, answer)
        for place, answer in zip(places, answers, strict=False)
        if answer.score is None
    ]
    if not failed:
        return fine(
            f"{scorer} can be loaded" + (f"; scores {len(answers)} rows" if answers else "")
        )
    place, failed_answer = failed[0]
    is_partial = len(failed) < len(answers)
    number = f"{len(failed)} of" if is_partial else "any of"
    frames = "".join(f"\n    {frame}" for frame in failed_answer.frames)
    what = (
        f"{scorer} has no score for {number} {len(answers)} rows and a made-up response; {place}: "
        f"{failed_answer.failure}{frames}"
    )
    remedy = _ALWAYS_A_NUMBER if is_partial else _REPAIR
    if scorer == BUILT_IN:
        # The last "; ", since a refusal may quote a ground truth with another.
        refusal, _, advice = failed_answer.failure.rpartition("; ")
        remedy = advice if refusal else _OTHER_TRUTH
        what = what.replace(failed_answer.failure, refusal or advice)
    if is_partial:
        return warning(what, _LEFT_OUT, remedy)
    return problem(what, "every group would fail, and nothing would be trained", remedy)


def wrong_response_findings(
    scorer: str, right: Sequence[TrialAnswer], wrong: Sequence[TrialAnswer]
) -> Iterator[Finding]:
    """Warn if a wrong response has no score where a made-up one has."""
    for answer in wrong:
        if answer.score is None and right[0].score is not None:
            frames = "".join(f"\n    {frame}" for frame in answer.frames)
            yield warning(
                f"{scorer} has no score for the response '{_WRONG_RESPONSE}': "
                f"{answer.failure}{frames}",
                _LEFT_OUT,
                _ALWAYS_A_NUMBER,
            )


def metric_findings(
    groups: FilterGroupsConfig, answers: Sequence[TrialAnswer]
) -> Iterator[Finding]:
    """Report a metric of the group filter that no graded response has."""
    graded = [
        Scored(answer.score, answer.score, answer.metrics)
        for answer in answers
        if answer.score is not None
    ]
    if not groups.enable or groups.metric in _OVERLONG_METRICS:
        return
    if any(groups.metric in scored.metrics for scored in graded):
        return
    for scored in graded[:1]:
        try:
            metric_value(scored, groups.metric)
        except ConfigError as error:
            yield problem_of_text(str(error), _REFUSED)


def try_responses(
    config: RunConfig, pairs: Sequence[tuple[PromptRow, str]], enough_s: float
) -> tuple[list[TrialAnswer], str]:
    """Grade responses in a scorer process, with its limits.

    Args:
        config: what grades, and in which sandbox.
        pairs: rows, each with a response.
        enough_s: a row after this is not graded any more.

    Returns:
        The outcomes, in order, and what the scorer printed.

    Raises:
        ConfigError: what grades cannot be loaded; names file, function and the Python error.
    """
    reward = config.reward
    rows = [
        ScorerInput(
            row.data_source,
            response,
            row.ground_truth,
            row.extra_info,
            _question_text(row),
            row.truth_is_json,
        )
        for row, response in pairs
    ]
    trial = ScorerTrial(reward, config.sluice.sandbox, rows, enough_s)
    timeout_s = _TRIAL_S + enough_s + reward.scorer_pool.timeout_s  # a judge may be slow
    function = reward.custom_reward_function.path
    return ask_module(
        _GRADE,
        trial,
        list[TrialAnswer],
        task="loading and calling "
        + (f"reward.custom_reward_function.path = {function}" if function else "what grades"),
        timeout_s=timeout_s,
        remedy="look for a download or an endless loop",
    )


def check_environment(context: DoctorContext) -> Iterator[Finding]:
    """Load the environment's file, or verl's tools, in a process of its own."""
    config = context.config
    settings, turns = config.sluice.environment, config.actor_rollout_ref.rollout.multi_turn
    source = EnvironmentSource(
        settings.path, settings.name, turns.function_tool_path, turns.tool_config_path
    )
    if not source.is_given:
        return
    file = settings.path or turns.function_tool_path or turns.tool_config_path
    try:
        (name, *tools), _ = ask_module(
            _LOAD,
            source,
            list[str],
            task=f"loading {file}",
            timeout_s=_LOADING_S,
            remedy="look for a download or an endless loop",
        )
    except SluiceError as error:
        yield problem_of_text(str(error), _REFUSED)
        return
    yield fine(f"{file}: {name}" + (f" with the tools {', '.join(tools)}" if tools else ""))


def _question_text(row: PromptRow) -> str:
    return row.messages[-1].content if row.messages else ""


def made_up_response(row: PromptRow) -> str:
    """Return a response that ends with the ground truth, in the forms that scorers look for."""
    truth = row.ground_truth[:_LONGEST_TRUTH]
    return f"Let me think.\n#### {truth}\nAnswer: {truth}\n\\boxed{{{truth}}}"


def _trial_rows(context: DoctorContext) -> list[PromptRow]:
    """Return some rows of each data source that has a scorer; the check of data reports the others,
    and files that cannot be read."""
    config, counts = context.config, Counter[str]()
    reward, rows = config.reward, list[PromptRow]()
    routes = {**DEFAULT_ROUTES, **reward.scorer_routes}
    ungraded: set[str | None] = {None}
    if backend_of(config.sluice.sandbox, reward.sandbox_fusion) is None:
        ungraded.add(PROGRAM_TESTS)
    is_custom = reward.custom_reward_function.path is not None
    for key, files in prompt_files(config).items():
        if not files:
            continue
        try:
            for row in context.first_rows(key)[1]:
                source = row.data_source
                is_graded = is_custom or scorer_name(source, routes) not in ungraded
                if is_graded and counts[source] < ROWS_OF_A_SOURCE:
                    counts[source] += 1
                    rows.append(row)
        except DataError:
            continue
    return rows[:ROWS_LOOKED_AT]
