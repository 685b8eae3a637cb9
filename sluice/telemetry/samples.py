"""Write samples for readers: an archive of ended groups of bounded size, and verl's dumps by
step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.types import Failed, GradedGroup, Outcome, Prompt, PromptEnd, Rollout, Turn
from sluice.whole_file import append_lines, write_whole

FOLDER_NAME = "samples"
_NUM_FILES = 8
_FLUSH_BYTES = 1 << 20

_CUT = "\n[… {} characters left out …]\n"

_MIN_CHARS = 200  # of each of many turns

_OWN_COLUMNS = ("input", "output", "gts", "score", "step")


class SampleArchive:
    """Files of lines, of bounded size together; the oldest are deleted.

    Args:
        folder: made with the first line.
        max_bytes: of all files together; a line longer than an eighth of it may exceed it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._file_bytes = max(max_bytes // _NUM_FILES, 1)
        self._number: int | None = None
        self._size = 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Write lines, each without its newline; hold few of them at a time.

        Raises:
            OSError: the folder cannot be written.
        """
        pending = bytearray()
        for line in lines:
            if self._number is None or self._size + len(pending) >= self._file_bytes:
                self._write(pending)
                self._begin_file()
            pending += line + b"\n"
            if len(pending) >= _FLUSH_BYTES:
                self._write(pending)
        self._write(pending)

    def _write(self, pending: bytearray) -> None:
        if pending:
            append_lines(self._path(self._number or 0), pending)
            self._size += len(pending)
            pending.clear()

    def _begin_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        present = archive_files(self._folder)
        newest = max((int(path.stem) for path in present), default=0)
        self._number, self._size = max(newest, self._number or 0) + 1, 0
        num_bytes = sum(path.stat().st_size for path in present)
        for path in present:
            if num_bytes + self._file_bytes <= self._max_bytes:
                break
            num_bytes -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.jsonl"


def archive_files(folder: Path) -> list[Path]:
    """Return the files of an archive, oldest first; none if there is no such folder."""
    files = [path for path in folder.glob("*.jsonl") if path.stem.isascii() and path.stem.isdigit()]
    return sorted(files, key=lambda path: int(path.stem))


class SampledTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a response.

    Args:
        text: what the policy wrote; shortened.
        tokens: that it sampled.
        read: the messages that it read before, each after its role; shortened.
        read_tokens: tokens that it read beyond the turn that it continues.
        parent: index of the turn that it continues; null: it is a root.
        is_new_root: it does not begin with the group's prompt.
        finish: why it ended, a `FinishReason`.
        reward: of its own; null without one.
        seconds: spent, by part.
    """

    text: str
    tokens: int
    read: str = ""
    read_tokens: int = 0
    parent: int | None = None
    is_new_root: bool = False
    finish: str = ""
    reward: float | None = None
    seconds: dict[str, float] = {}


class SampledResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response.

    Args:
        text: the response; the middle of a long one is left out, see `shorten_middle`.
        tokens: its length.
        finish: why it ended, a `FinishReason`.
        score: the scorer's number; null without one.
        reward: the score with its shaping.
        failure: why there is no score; empty if there is one.
        versions: oldest and newest policy version that sampled a token; null if there is none.
        metrics: further numbers of the scorer.
        turns: of an episode; the text is then the last one's. All of their texts together are about
            as long as one response may be.
        episode_end: why the environment ended, an `EpisodeEnd`; empty: there is none, or it failed.
    """

    text: str
    tokens: int
    finish: str
    score: float | None = None
    reward: float | None = None
    failure: str = ""
    versions: tuple[int, int] | None = None
    metrics: dict[str, float | None] = {}
    turns: list[SampledTurn] = []
    episode_end: str = ""


class SampledGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group.

    Args:
        prompt_id: its prompt.
        end: how it ended, a `PromptEnd`.
        version: policy version announced when it started.
        ended_at: seconds since 1970.
        prompt: the text of all turns.
        step: that trained it; null for others.
        ground_truth: what the scorer compared with.
        data_source: of the prompt.
        environment: of its samples; empty: they have none.
        replicas: those that generated it, by their first request.
        responses: in the order of samples; none if nothing was graded.
    """

    prompt_id: str
    end: str
    version: int
    ended_at: float
    prompt: str
    step: int | None = None
    ground_truth: str = ""
    data_source: str = ""
    environment: str = ""
    replicas: list[str] = []
    responses: list[SampledResponse] = []


def sampled_group(
    prompt: Prompt,
    end: PromptEnd,
    graded: GradedGroup | None,
    *,
    version: int,
    step: int | None,
    ended_at: float,
    replicas: list[str],
    max_chars: int,
) -> SampledGroup:
    """Return the archive's record of a group.

    Args:
        max_chars: of the prompt and of each response.
    """
    pairs = zip(graded.group.rollouts, graded.outcomes, strict=True) if graded else ()
    return SampledGroup(
        prompt_id=prompt.prompt_id,
        end=end.value,
        version=version,
        ended_at=ended_at,
        prompt=shorten_middle("\n".join(turn.content for turn in prompt.messages), max_chars),
        step=step,
        ground_truth=shorten_middle(prompt.ground_truth, max_chars),
        data_source=prompt.data_source,
        replicas=replicas,
        responses=[_sampled_response(rollout, outcome, max_chars) for rollout, outcome in pairs],
    )


def shorten_middle(text: str, max_chars: int) -> str:
    """Return `text`; of a longer one the beginning and the end, with a mark that counts the rest.

    The end gets a quarter: a response's answer is usually there.
    """
    left_out = len(text) - max_chars
    if left_out <= 0:
        return text
    tail = max_chars // 4
    return text[: max_chars - tail] + _CUT.format(left_out) + text[len(text) - tail :]


def _sampled_response(rollout: Rollout, outcome: Outcome, max_chars: int) -> SampledResponse:
    versions = [span.version for span in rollout.version_spans]
    text = shorten_middle(rollout.text, max_chars)
    sampled_by = (min(versions), max(versions)) if versions else None
    response = SampledResponse(
        text,
        rollout.num_tokens,
        rollout.finish_reason.value,
        versions=sampled_by,
        turns=_sampled_turns(rollout, max_chars),
        episode_end=rollout.end.value if rollout.end else "",
    )
    if isinstance(outcome, Failed):
        failure = shorten_middle(f"{outcome.kind.value}: {outcome.detail}", max_chars)
        return msgspec.structs.replace(response, failure=failure)
    return msgspec.structs.replace(
        response, score=outcome.score, reward=outcome.reward, metrics=dict(outcome.metrics)
    )


def _sampled_turns(rollout: Rollout, max_chars: int) -> list[SampledTurn]:
    if rollout.end is None and len(rollout.turns) == 1 and not rollout.turns[0].observed:
        return []
    max_turn_chars = max(max_chars // (2 * len(rollout.turns)), min(max_chars, _MIN_CHARS))
    return [
        SampledTurn(
            shorten_middle(turn.text, max_turn_chars),
            int(turn.token_ids.size),
            shorten_middle(_read_text(turn), max_turn_chars),
            int(turn.context.size),
            turn.parent,
            turn.is_new_root,
            turn.finish_reason.value,
            turn.reward,
            {part: round(seconds, 3) for part, seconds in turn.seconds.items()},
        )
        for turn in rollout.turns
    ]


def transcript(rollout: Rollout) -> str:
    """Return the text of a sample: of several turns, with what it read between them."""
    if rollout.whole_text is not None:
        return rollout.whole_text
    parts = (part for turn in rollout.turns for part in (_read_text(turn), turn.text))
    return "\n".join(part for part in parts if part)


def _read_text(turn: Turn) -> str:
    return "\n".join(f"[{message.role}] {message.content}" for message in turn.observed)


@dataclass(frozen=True, slots=True)
class DumpedSample:
    """One response.

    Args:
        extras: further columns, such as the scorer's; columns named like verl's own are left out.
    """

    input: str
    output: str
    gts: object
    score: float
    extras: Mapping[str, object] = field(default_factory=dict)


def write_dump(folder: Path, samples: Iterable[DumpedSample], step: int) -> Path:
    """Write ``<folder>/<step>.jsonl``, replacing a whole file at once; make the folder.

    NaN and infinity become null, types that JSON lacks their text.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{step}.jsonl"
    write_whole(target, "".join(_dump_line(sample, step) + "\n" for sample in samples).encode())
    return target


def _dump_line(sample: DumpedSample, step: int) -> str:
    values = (sample.input, sample.output, sample.gts, sample.score, step)
    row = {**sample.extras, **dict(zip(_OWN_COLUMNS, values, strict=True))}
    ordered = {name: row[name] for name in (*_OWN_COLUMNS, *sample.extras)}
    return json.dumps(
        {n: _finite_values(v) for n, v in ordered.items()}, ensure_ascii=False, default=str
    )


def _finite_values(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_values(item) for item in value]
    return value
