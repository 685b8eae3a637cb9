"""Messages between the reward service and its scorer processes.

Frames are a 4-byte little-endian length and a msgpack body. The service sends one `ScorerSetup`,
then `ScoreRequest`s; the process answers `SetupReply`, then one `ScoreReply` per request, with the
request's number: a reply that belongs to no request is a fault, never a score.

Both also map a small shared page. There the process writes which item of the request it works on,
and since when, so that after a hang or crash the service knows which item caused it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from mmap import mmap
from typing import NamedTuple

import msgspec

from sluice.config.schema.reward import RewardModelConfig, SandboxFusionConfig
from sluice.config.schema.service import SandboxConfig
from sluice.data.scoring import ScorerInput

FRAME_HEADER = struct.Struct("<I")
MAX_REPLY_BYTES = 64 * 2**20
PROGRESS_BYTES = 4096
_PROGRESS = struct.Struct("<qd")
_IDLE = -1


class ScorerSetup(msgspec.Struct, frozen=True, array_like=True):
    """First message to a process: the scorer and its limits.

    The scorer is the custom function if `custom_path` is set, else the reward model if there is
    one, else the built-in scorers by data source, `routes` first.
    """

    custom_path: str | None
    custom_name: str
    custom_kwargs: Mapping[str, object]
    timeout_s: float
    memory_bytes: int
    routes: Mapping[str, str] = {}
    reward_model: RewardModelConfig | None = None
    sandbox: SandboxConfig = SandboxConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()


class SetupReply(msgspec.Struct, frozen=True, array_like=True):
    """`error` says why the process cannot score; ``None`` if it is ready."""

    error: str | None


class ScoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """Responses to grade in order."""

    number: int
    items: tuple[ScorerInput, ...]


class ScorerNumber(msgspec.Struct, frozen=True, tag="number"):
    """The scorer's finite number and its further finite numbers."""

    score: float
    metrics: dict[str, float]
    prediction: str | None = None


class ScorerRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why the scorer gave no number; `frames` are an exception's innermost frames, innermost
    first."""

    detail: str
    frames: tuple[str, ...] = ()


ScorerAnswer = ScorerNumber | ScorerRefusal


class ScoreReply(msgspec.Struct, frozen=True, array_like=True):
    """One answer per item of the request with this number, in order."""

    number: int
    answers: tuple[ScorerAnswer, ...]


class Progress(NamedTuple):
    """`item` is being scored since `started_at` (``time.monotonic``); -1 for no item."""

    item: int
    started_at: float


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as a frame for the pipe."""
    body = msgspec.msgpack.encode(message)
    return FRAME_HEADER.pack(len(body)) + body


def encoding_error(message: msgspec.Struct) -> str | None:
    """Return why a message cannot be sent, such as an integer above 64 bits; ``None`` if it can."""
    try:
        msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        return str(error)
    return None


def note_progress(page: mmap, item: int, started_at: float) -> None:
    """Write which item is being scored."""
    _PROGRESS.pack_into(page, 0, item, started_at)


def note_idle(page: mmap) -> None:
    """Write that nothing is being scored."""
    _PROGRESS.pack_into(page, 0, _IDLE, 0.0)


def read_progress(
    page: mmap, num_items: int, sent_at: float, now_s: float | None = None
) -> Progress | None:
    """Return which item is being scored; ``None`` between requests.

    A scorer may have written anything: an index outside the request's items counts as no item, and
    a time outside the request is clamped to it.

    Args:
        sent_at: when the request was sent, by ``time.monotonic``.
        now_s: the current time on the same clock.
    """
    item, started_at = _PROGRESS.unpack_from(page, 0)
    if not 0 <= item < num_items:
        return None
    if not started_at >= sent_at:  # true for NaN, too
        started_at = sent_at
    return Progress(item, min(started_at, time.monotonic() if now_s is None else now_s))
