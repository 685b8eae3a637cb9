"""Check the prompts of a run: columns, the first rows, and their length with the chat template."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sluice.concurrency.answers import ask_module
from sluice.config.derived import may_grade_itself
from sluice.config.rules.files import model_problems
from sluice.config.run import RunConfig
from sluice.config.schema.data import DataConfig
from sluice.config.sources import VAL_KEY, prompt_files, source_groups
from sluice.data.prompt_files import PromptFiles
from sluice.data.prompt_rows import PromptRow
from sluice.data.scoring import DEFAULT_ROUTES, PROGRAM_TESTS, ROUTED_SCORERS, scorer_name
from sluice.doctor.finding import DoctorContext, Finding, fine, problem, problem_of_text, warning
from sluice.doctor.trial import PromptsToMeasure
from sluice.errors import ConfigError, DataError
from sluice.sandbox.choice import NO_SANDBOX, backend_of

_MEASURING_S = 90.0
_MEASURE = "services.rollout.prompt_check"
_LONGEST_TEXT = 300


def check_data(context: DoctorContext) -> Iterator[Finding]:
    """Check columns of every file, and the first rows with the model's chat template."""
    config = context.config
    rows: dict[str, list[PromptRow]] = {}
    for key, files in prompt_files(config).items():
        if not files:
            consequence = (
                "no validation" if key == VAL_KEY else "only clients' prompts are trained on"
            )
            yield fine(f"{key} is null: {consequence}")
            continue
        try:
            opened, rows[key] = context.first_rows(key)
        except DataError as error:
            yield problem_of_text(str(error), "the reward service refuses to start")
            continue
        yield from _row_findings(config, key, opened, rows[key])
    yield from _length_findings(config, rows)


def _row_findings(
    config: RunConfig, key: str, opened: PromptFiles, rows: Sequence[PromptRow]
) -> Iterator[Finding]:
    sources = Counter(row.data_source for row in rows)
    reward, batch = config.reward, config.data.train_batch_size
    is_scored = reward.custom_reward_function.path is None and not reward.reward_model.enable
    if is_scored and not may_grade_itself(config):
        routes = {**DEFAULT_ROUTES, **reward.scorer_routes}
        yield from source_findings(key, sources, routes)
        if backend_of(config.sluice.sandbox, reward.sandbox_fusion) is None:
            yield from program_findings(key, sources, routes)
    if opened.num_rows < (groups := _groups_of_a_batch(config, key)):
        yield warning(
            f"{key}: {opened.num_rows} rows are fewer than its {groups} groups of a batch "
            f"(data.train_batch_size = {batch})",
            "an epoch does not fill one batch, and filtering leaves less",
            "lower data.train_batch_size, or raise trainer.total_epochs",
        )
    num_files = len({block.path for block in opened.blocks})
    yield fine(f"{key}: {opened.num_rows} rows in {num_files} file(s); {', '.join(sources)}")


def _groups_of_a_batch(config: RunConfig, key: str) -> int:
    if len(config.sluice.sources) > config.data.train_batch_size:  # the rules refuse that
        return 0
    # Both are in the order of the sources; the files of validation come last.
    groups = dict(zip(prompt_files(config), source_groups(config).values(), strict=False))
    return groups.get(key, 0)


def source_findings(
    key: str, sources: Mapping[str, int], routes: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a problem if no scorer grades a data source; `sources` counts the first rows."""
    unknown = [name for name in sources if scorer_name(name, routes) is None]
    if unknown:
        yield problem(
            f"{key}: no scorer is known for data source {unknown[0]!r} "
            f"({sources[unknown[0]]} of the first {sum(sources.values())} rows)",
            "its samples cannot be graded, so every group of it fails",
            "set reward.custom_reward_function.path, or name a built-in scorer in "
            f"reward.scorer_routes ({', '.join(sorted({*routes.values(), *ROUTED_SCORERS}))})",
        )


def program_findings(
    key: str, sources: Mapping[str, int], routes: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a problem if programs are to be graded, where no sandbox is configured."""
    programs = [name for name in sources if scorer_name(name, routes) == PROGRAM_TESTS]
    if programs:
        yield problem_of_text(
            f"{key}: data source {programs[0]!r}: {NO_SANDBOX}", "nothing may run them"
        )


def _length_findings(
    config: RunConfig, rows: Mapping[str, Sequence[PromptRow]]
) -> Iterator[Finding]:
    """Measure text rows; how many tokens an image takes is left to the replicas."""
    measured = [(key, row) for key, of_file in rows.items() for row in of_file if not row.images]
    if not measured or any(model_problems(config.actor_rollout_ref.model.path)):
        return  # the check of the model reports its folder
    if importlib.util.find_spec("transformers") is None:
        yield warning(
            "the chat template was not tried: transformers is not installed here",
            "rows that it refuses, or that are too long, show while the run works",
            "pip install 'sluice[torch]'",
        )
        return
    try:
        answers = measure_tokens(config, [row for _, row in measured])
    except ConfigError as error:
        yield problem_of_text(str(error), "replicas refuse to start")
        return
    for key in rows:
        answers_of_key = [
            (row, answer)
            for (row_key, row), answer in zip(measured, answers, strict=True)
            if row_key == key
        ]
        yield from template_findings(answers_of_key)
        tokens = {row.place: answer for row, answer in answers_of_key if isinstance(answer, int)}
        yield from overlong_findings(config.data, key, tokens)


def measure_tokens(config: RunConfig, rows: Sequence[PromptRow]) -> list[int | str]:
    """Return each row's tokens with the chat template, or why the template refuses it.

    Raises:
        ConfigError: none can be measured.
    """
    data, model = config.data, config.actor_rollout_ref.model
    request = PromptsToMeasure(
        model.path,
        data.apply_chat_template_kwargs,
        model.trust_remote_code,
        [[(turn.role, turn.content) for turn in row.messages] for row in rows],
    )
    answers, _ = ask_module(
        _MEASURE,
        request,
        list[int | str],
        task=f"actor_rollout_ref.model.path = {model.path}: tokenizing {len(rows)} prompts",
        timeout_s=_MEASURING_S,
        remedy="look at its tokenizer and chat template",
    )
    return answers


def template_findings(answers: Sequence[tuple[PromptRow, int | str]]) -> Iterator[Finding]:
    """Yield a finding if the chat template refuses rows: a problem if it refuses all of them."""
    refused = [(row.place, answer) for row, answer in answers if isinstance(answer, str)]
    if not refused:
        return
    place, reason = refused[0]
    is_all = len(refused) == len(answers)
    count = f"all of the first {len(answers)}" if is_all else f"{len(refused)} of {len(answers)}"
    report = problem if is_all else warning
    yield report(
        f"{place}: {reason[:_LONGEST_TEXT]} ({count} rows)",
        "replicas refuse such a prompt, and its group fails",
        "change the roles or the order of the messages, or the chat template of the model",
    )


def overlong_findings(data: DataConfig, key: str, tokens: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a finding if rows exceed data.max_prompt_length; `tokens`: by the row's place."""
    limit = data.max_prompt_length
    overlong = {place: count for place, count in tokens.items() if count > limit}
    if not overlong:
        return
    place, longest = max(overlong.items(), key=lambda item: item[1])
    is_left_out = data.filter_overlong_prompts or data.truncation == "error"
    remedy = (
        "raise data.max_prompt_length (`sluice data inspect FILE --tokenizer MODEL` counts all)"
    )
    if is_left_out and len(overlong) == len(tokens):
        yield problem(
            f"{key}: all of the first {len(tokens)} rows exceed data.max_prompt_length = {limit} "
            f"(the shortest has {min(tokens.values())} tokens)",
            "all of them are left out, and nothing is trained",
            remedy,
        )
        return
    key_of_fate = "data.truncation"
    fate = f"they lose tokens ({key_of_fate} = {data.truncation})"
    if data.filter_overlong_prompts:
        fate = "they are left out (data.filter_overlong_prompts)"
    elif is_left_out:
        fate = f"they are dropped with a warning ({key_of_fate} = error)"
    yield warning(
        f"{key}: {len(overlong)} of the first {len(tokens)} rows exceed data.max_prompt_length = "
        f"{limit} (the longest: {place}, {longest} tokens)",
        fate,
        remedy,
    )
