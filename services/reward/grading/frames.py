"""The frames of a scorer's exception that its author wants to see."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

MAX_FRAMES = 3
MAX_LINE_CHARS = 120
_OWN = frozenset({"scorer_main.py", "custom.py"})
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def last_frames(error: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """Return the scorer's frames, the last first, without the calls that lead to the scorer.

    Frames of libraries count only where there are no others.
    """
    own = Path(__file__).parent
    found = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (Path(frame.filename).name in _OWN and own in Path(frame.filename).parents)
    ]
    of_author = [frame for frame in found if not frame.filename.startswith(_LIBRARIES)]
    return tuple(reversed(of_author or found))[:MAX_FRAMES]


def place_of(error: BaseException) -> str:
    """Return `` in compute_score (my_reward.py:12)``; empty if no frame is known."""
    frames = last_frames(error)
    return (
        f" in {frames[0].name} ({Path(frames[0].filename).name}:{frames[0].lineno})"
        if frames
        else ""
    )


def frame_texts(error: BaseException) -> tuple[str, ...]:
    """Return a line for each of the last frames, with its code."""
    return tuple(
        f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '')[:MAX_LINE_CHARS]}"
        for frame in last_frames(error)
    )
