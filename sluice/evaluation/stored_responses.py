"""The responses of an evaluation as they lie on disk: ``responses/<benchmark>.jsonl``, a line for
each finished prompt.

A kill may cut the last line short; that prompt counts as unfinished. A damaged line anywhere else
is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from sluice.errors import DataError
from sluice.json_objects import DECODE_ERRORS
from sluice.types import Failed, Outcome, Scored

FOLDER_NAME = "responses"
_SUFFIX = ".jsonl"
_SCORE, _PREDICTION = "score", "pred"  # of verl's reward_extra_info
_KEY_BYTES = 16


class StoredMessage(msgspec.Struct, frozen=True):
    """One turn of the prompt."""

    role: str
    content: str


class StoredGrade(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a response was graded once; `failure` says why there is no reward."""

    reward: float | None = None
    metrics: dict[str, float | str | None] = {}
    failure: str | None = None


class StoredSample(msgspec.Struct, frozen=True):
    """One response with its grade.

    Attributes:
        response: its text.
        reward: the score with its shaping; null where there is no score.
        metrics: verl's reward_extra_info: ``score``, ``pred`` and the scorer's further numbers.
        failure: why there is no score.
        tokens: sampled.
        finish_reason: a `FinishReason`.
        turns: model calls.
        last_turn: the text that scorers grade; null: that is the response.
        is_graded_by_environment: no scorer has graded it.
        earlier: its grades before it was graded again, the oldest first.
    """

    response: str
    reward: float | None = None
    metrics: dict[str, float | str | None] = {}
    failure: str | None = None
    tokens: int = 0
    finish_reason: str = ""
    turns: int = 1
    last_turn: str | None = None
    is_graded_by_environment: bool = False
    earlier: list[StoredGrade] = []

    @property
    def grade(self) -> StoredGrade:
        """Its grade alone."""
        return StoredGrade(self.reward, self.metrics, self.failure)

    def graded(self, outcome: Outcome) -> StoredSample:
        """Return it with another outcome: verl's reward_extra_info, or a failure."""
        if isinstance(outcome, Failed):
            failure = f"{outcome.kind}: {outcome.detail}"
            return msgspec.structs.replace(self, reward=None, metrics={}, failure=failure)
        metrics: dict[str, float | str | None] = {**outcome.metrics, _SCORE: outcome.score}
        if outcome.prediction is not None:
            metrics[_PREDICTION] = outcome.prediction
        return msgspec.structs.replace(self, reward=outcome.reward, metrics=metrics, failure=None)

    @property
    def scored(self) -> Scored | None:
        """The grade as validation has it; ``None``: it failed."""
        if self.reward is None:
            return None
        numbers = {
            name: float(value)
            for name, value in self.metrics.items()
            if name not in {_SCORE, _PREDICTION} and isinstance(value, float | int)
        }
        score, prediction = self.metrics.get(_SCORE), self.metrics.get(_PREDICTION)
        return Scored(
            score if isinstance(score, float) else self.reward,
            self.reward,
            numbers,
            None if prediction is None else str(prediction),
        )


class StoredPrompt(msgspec.Struct, frozen=True):
    """A finished prompt with all of its samples; `position` is that of its row in the benchmark."""

    position: int
    data_source: str
    samples: list[StoredSample]
    prompt: list[StoredMessage] = []
    ground_truth: Any = None
    extra_info: Any = None

    @property
    def question(self) -> str:
        """The text of all turns of the prompt."""
        return "\n".join(message.content for message in self.prompt)

    @property
    def key(self) -> bytes:
        """What the prompt is, whatever its position: a digest of its messages and ground truth."""
        content = msgspec.json.encode((self.prompt, self.ground_truth), order="sorted")
        return blake2b(content, digest_size=_KEY_BYTES).digest()


def response_files(folder: Path) -> dict[str, Path]:
    """Return the files of an evaluation by benchmark, in the order of their names.

    Raises:
        DataError: the folder holds none.
    """
    files = sorted((folder / FOLDER_NAME).glob(f"*{_SUFFIX}"))
    if not files:
        raise DataError(
            f"{folder}: holds no {FOLDER_NAME}/*{_SUFFIX}; give the --output folder of an "
            "evaluation (`sluice eval --model`)"
        )
    return {file.name.removesuffix(_SUFFIX): file for file in files}


def read_responses(file: Path) -> Iterator[tuple[int, StoredPrompt]]:
    """Yield the finished prompts of a file, each after the offset of its line in bytes.

    Texts are held for one prompt at a time. A prompt that was stored twice counts once, as it was
    stored first.

    Raises:
        DataError: a line that is not the last one is damaged; names file, line and problem.
        OSError: the file cannot be read.
    """
    positions: set[int] = set()
    decoder = msgspec.json.Decoder(StoredPrompt)
    offset = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place, offset = offset, offset + len(line)
            if not line.endswith(b"\n"):
                return  # cut short by a kill
            if not line.strip():
                continue
            prompt = _decode_line(decoder, line, file, number)
            if prompt.position not in positions:
                positions.add(prompt.position)
                yield place, prompt


def read_at(file: Path, places: Sequence[tuple[int, bytes]]) -> Iterator[StoredPrompt]:
    """Yield the prompts at some offsets, as `read_responses` gave them, each with its key.

    Raises:
        DataError: another prompt is there, or none: the file was written again.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(StoredPrompt)
    with file.open("rb") as lines:
        for offset, key in places:
            lines.seek(offset)
            prompt = None
            with suppress(*DECODE_ERRORS):
                prompt = decoder.decode(lines.readline())
            if prompt is None or prompt.key != key:
                raise DataError(f"{file}: an evaluation has written it again; repeat the command")
            yield prompt


def _decode_line(
    decoder: msgspec.json.Decoder[StoredPrompt], line: bytes, file: Path, number: int
) -> StoredPrompt:
    try:
        return decoder.decode(line)
    except DECODE_ERRORS as error:
        raise DataError(
            f"{file}, line {number}: {error}; delete the line, and evaluate again: only its prompt "
            "is sampled"
        ) from error
