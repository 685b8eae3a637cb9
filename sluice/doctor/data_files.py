"""Files of prompts: readable, with the columns that a run reads, and sources with a scorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from sluice.config.run import RunConfig
from sluice.data.known_sources import DEFAULT_ROUTES, scorer_name
from sluice.data.prompt_files import PromptFiles, SlabReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns, PromptRow
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, problem_of_sentence, warning
from sluice.errors import DataError

ROWS_LOOKED_AT = 256
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class DataFacts:
    """The files of one key.

    Attributes:
        key: that names them.
        files: as named.
        num_rows: in all of them.
        defect: why they cannot be read, with the remedy; empty if they can.
        sources: data sources of the first rows, and how many have each.
        has_own_scorer: a reward function or model grades whatever the source.
        routes: of the configuration and built in.
        batch_rows: rows of one train batch; 0 for files that make none.
    """

    key: str
    files: tuple[str, ...]
    num_rows: int = 0
    defect: str = ""
    sources: Mapping[str, int] = field(default_factory=dict)
    has_own_scorer: bool = False
    routes: Mapping[str, str] = field(default_factory=lambda: DEFAULT_ROUTES)
    batch_rows: int = 0


def check_data(examined: Examined) -> Iterator[Finding]:
    """Columns of every file, and the first rows."""
    data, config = examined.config.data, examined.config
    batch = data.train_batch_size
    yield from data_findings(_facts(config, "data.train_files", data.train_files, batch))
    yield from data_findings(_facts(config, "data.val_files", data.val_files, 0))


def data_findings(facts: DataFacts) -> Iterator[Finding]:
    """What cannot be read, is too little, or would be graded by nothing."""
    if not facts.files:
        consequence = (
            "only clients' prompts are trained on" if facts.batch_rows else "no validation"
        )
        yield fine(f"{facts.key} is null: {consequence}")
        return
    if facts.defect:
        yield problem_of_sentence(facts.defect, "the reward service refuses to start")
        return
    unknown = [name for name in facts.sources if scorer_name(name, facts.routes) is None]
    if unknown and not facts.has_own_scorer:
        yield problem(
            f"{facts.key}: no scorer is known for data source {unknown[0]!r} "
            f"({facts.sources[unknown[0]]} of the first {sum(facts.sources.values())} rows)",
            "its samples cannot be graded, so every group of it fails",
            "set reward.custom_reward_function.path, or name a built-in scorer in "
            f"reward.scorer_routes ({', '.join(sorted(set(facts.routes.values())))})",
        )
    if 0 < facts.num_rows < facts.batch_rows:
        yield warning(
            f"{facts.key}: {facts.num_rows} rows are fewer than data.train_batch_size = "
            f"{facts.batch_rows}",
            "an epoch does not fill one batch, and filtering leaves less",
            "lower data.train_batch_size, or raise trainer.total_epochs",
        )
    sources = ", ".join(facts.sources)
    yield fine(f"{facts.key}: {facts.num_rows} rows in {len(facts.files)} file(s); {sources}")


def _facts(
    config: RunConfig, key: str, named: str | list[str] | None, batch_rows: int
) -> DataFacts:
    files = (named,) if isinstance(named, str) else tuple(named or ())
    if not files:
        return DataFacts(key, files, batch_rows=batch_rows)
    columns = PromptColumns(config.data.prompt_key, config.data.reward_fn_key)
    try:
        opened = open_prompt_files(files, columns, config_key=key)
        sources = Counter(row.data_source for row in first_rows(opened))
    except DataError as error:
        return DataFacts(key, files, defect=str(error), batch_rows=batch_rows)
    reward = config.reward
    return DataFacts(
        key,
        files,
        opened.num_rows,
        sources=sources,
        has_own_scorer=reward.custom_reward_function.path is not None or reward.reward_model.enable,
        routes={**DEFAULT_ROUTES, **reward.scorer_routes},
        batch_rows=batch_rows,
    )


def first_rows(files: PromptFiles) -> Iterator[PromptRow]:
    """Decoded, with all that decoding checks; one of each file first, then those of the first.

    Raises:
        DataError: a row cannot be used.
    """
    reader, seen = SlabReader(), set[str]()
    for block in files.blocks:
        if block.path not in seen:
            count = 1 if seen else ROWS_LOOKED_AT
            seen.add(block.path)
            for slab in islice(reader.read(block), 1):
                for index in range(min(len(slab), count)):
                    yield slab.decode(index, files.columns)
