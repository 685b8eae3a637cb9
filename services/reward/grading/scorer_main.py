"""The process that runs scorers, so that a hang, a crash or a leak ends with it.

`scorer_worker` starts it as ``python -m services.reward.grading.scorer_main PARENT_PID PAGE_FD``.
It reads requests from standard input and answers on standard output; what the scorer prints goes to
standard error. It ends when its input ends or its parent dies. It imports no gRPC.

It sets its own resource limits (`limits`). Wall-clock limits are enforced from outside, because a
scorer that hangs in C code cannot be interrupted from within.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from services.reward.grading.limits import (
    MAX_OUTPUT_BYTES,
    ProcessLimit,
    end_with_parent,
    limit_cpu,
    limit_resources,
    limited_output,
)
from services.reward.grading.messages import (
    FRAME_HEADER,
    PROGRESS_BYTES,
    ScorerAnswer,
    ScoreReply,
    ScoreRequest,
    ScorerNumber,
    ScorerRefusal,
    ScorerSetup,
    SetupReply,
    frame,
    note_progress,
)
from services.reward.grading.scorers.custom import load_custom_scorer
from services.reward.grading.scorers.program_tests import ProgramTests
from services.reward.grading.scorers.registry import Scorer, check_routes, scorer_for
from sluice.data.scoring import ScorerInput
from sluice.errors import SluiceError
from sluice.safe_text import encodable
from sluice.sandbox.choice import backend_of, limits_of, proven_sandbox
from sluice.types import LARGEST_NUMBER

SCORE_KEY = "score"
ACCURACY_KEY = "acc"
PREDICTION_KEY = "pred"
MAX_KEYS = 64
MAX_KEY_CHARS = 128
MAX_PREDICTION_CHARS = 1000
MAX_DETAIL_CHARS = 500

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 150

MAX_OPEN_FILES = 256
MAX_FRAMES = 3
MAX_LINE_CHARS = 120
_OWN = frozenset({"scorer_main.py", "custom.py"})
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
ItemScorer = Callable[[ScorerInput], object]
MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def answer_of(returned: object) -> ScorerAnswer:
    """Interpret a scorer's return value like verl's reward managers
    (`verl/workers/reward_manager/naive.py`, `dapo.py`).

    Of a mapping, ``score`` is the score, ``pred``, cut to 1000 characters, the prediction, and the
    other numbers are metrics. A number is both score and accuracy. Of a list or tuple, the first
    element counts. Refuse a score that is missing, not a number, NaN or beyond float32, a metric
    that is NaN or infinite, and a mapping of more than 64 keys.
    """
    if isinstance(returned, Mapping):
        return _answer_of_mapping(returned)
    value = returned[0] if isinstance(returned, list | tuple) and returned else returned
    score = _number(value)
    if score is None or not abs(score) <= LARGEST_NUMBER:
        return refusal(
            f"the scorer returned {_short_repr(returned)}, which is not a finite number of at most "
            f"{LARGEST_NUMBER:.2g}; return a number, or a dict with 'score'"
        )
    return ScorerNumber(score, {ACCURACY_KEY: score})


def refusal(detail: str) -> ScorerRefusal:
    """Return a refusal with the reason, cut to 500 characters."""
    return ScorerRefusal(encodable(detail[:MAX_DETAIL_CHARS]))


def _answer_of_mapping(returned: Mapping[object, object]) -> ScorerAnswer:
    problem = _shape_problem(returned)
    if problem is not None:
        return refusal(problem)
    numbers = {encodable(str(key)): _number(value) for key, value in returned.items()}
    metrics = {key: value for key, value in numbers.items() if value is not None}
    metrics.pop(PREDICTION_KEY, None)
    score = metrics.pop(SCORE_KEY, None)
    if score is None or not abs(score) <= LARGEST_NUMBER:
        return refusal(
            f"the scorer's 'score' is {_short_repr(returned[SCORE_KEY])}, which is not a finite "
            f"number of at most {LARGEST_NUMBER:.2g}"
        )
    for key, value in metrics.items():
        if not math.isfinite(value):
            return refusal(f"the scorer's metric '{key}' is {value}, which is not finite")
    return ScorerNumber(score, metrics, _prediction(returned.get(PREDICTION_KEY)))


def _shape_problem(returned: Mapping[object, object]) -> str | None:
    if len(returned) > MAX_KEYS:
        return f"the scorer returned {len(returned)} keys; at most {MAX_KEYS} are taken"
    too_long = [key for key in returned if len(str(key)) > MAX_KEY_CHARS]
    if too_long:
        return (
            f"the scorer returned a key of {len(str(too_long[0]))} characters; at most "
            f"{MAX_KEY_CHARS} are taken"
        )
    if SCORE_KEY not in returned:
        keys = ", ".join(sorted(map(str, islice(returned, 8))))
        return f"the scorer returned a dict without 'score' (keys: {keys})"
    return None


def _prediction(value: object) -> str | None:
    return None if value is None else encodable(str(value)[:MAX_PREDICTION_CHARS])


def _short_repr(value: object) -> str:
    """Return a short representation, without formatting a million elements first."""
    return _SHORT.repr(value)


def _number(value: object) -> float | None:
    """Return `value` as a float; ``None`` if it is not a number. Text is never a number."""
    if getattr(value, "shape", None) == (1,):  # an array of one number, which NumPy's float refuses
        with suppress(LookupError, TypeError):  # whose elements have other keys: its float decides
            value = value[0]  # type: ignore[index]
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # has __float__, of any library's scalars
    except (TypeError, ValueError, OverflowError):
        return None


def main(parent_pid: int, page_fd: int) -> int:
    """Serve until the input ends. Return the exit code."""
    requests, replies = _take_over_pipes()
    end_with_parent(parent_pid)
    page = mmap(page_fd, PROGRESS_BYTES)
    setup = next(_messages(requests, ScorerSetup), None)
    if setup is None:
        return 0
    limit_resources(setup.memory_bytes, MAX_OPEN_FILES)
    processes = ProcessLimit()
    try:
        scorer = _chosen_scorer(setup)
    except SluiceError as error:
        _send(replies, SetupReply(str(error)))
        return 1
    _send(replies, SetupReply(None))
    with limited_output(MAX_OUTPUT_BYTES) as output:
        for request in _messages(requests, ScoreRequest):
            processes.renew()
            limit_cpu(setup.timeout_s * len(request.items))
            output.begin_request()
            answers = [_answer(scorer, item, i, page) for i, item in enumerate(request.items)]
            output.flush()  # the process may be killed after its answer
            _send(replies, ScoreReply(request.number, tuple(answers)))
    return 0


def _chosen_scorer(setup: ScorerSetup) -> ItemScorer:
    if setup.custom_path is not None:
        custom = load_custom_scorer(setup.custom_path, setup.custom_name, setup.custom_kwargs)
        return lambda item: _call_scorer(custom, item, as_value=True)
    if setup.reward_model is not None:
        # Imported here, since it loads http and ssl, which other scorers do not need.
        from services.reward.grading.scorers.reward_model import RewardModelScorer

        model = RewardModelScorer(setup.reward_model, setup.timeout_s)
        return lambda item: _call_scorer(partial(model, question=item.question), item)
    check_routes(setup.routes)
    programs = _program_tests(setup)

    def graded(item: ScorerInput) -> object:
        truth = item.ground_truth if item.truth_is_json else ""
        built_in = scorer_for(item.data_source, truth, routes=setup.routes, programs=programs)
        return _call_scorer(built_in, item)

    return graded


def _program_tests(setup: ScorerSetup) -> ProgramTests | None:
    """Return the grader of programs, after the sandbox has run one; ``None`` without a sandbox."""
    if backend_of(setup.sandbox, setup.sandbox_fusion) is None:
        return None
    sandbox = proven_sandbox(setup.sandbox, setup.sandbox_fusion)
    return ProgramTests(sandbox, limits_of(setup.sandbox), setup.timeout_s)


def _call_scorer(scorer: Scorer, item: ScorerInput, *, as_value: bool = False) -> object:
    """Call the scorer, with the ground truth as text or as the row's value. Add to extra_info what
    verl adds (`verl/experimental/reward_loop/reward_manager/naive.py`).
    """
    truth, is_value = item.ground_truth, as_value and item.truth_is_json
    return scorer(
        data_source=item.data_source,
        solution_str=item.response,
        ground_truth=json.loads(truth) if is_value else truth,
        extra_info={
            **item.extra_info,
            "num_turns": item.num_turns,
            "rollout_reward_scores": {},
        },
    )


def _answer(scorer: ItemScorer, item: ScorerInput, index: int, page: mmap) -> ScorerAnswer:
    process = os.getpid()
    note_progress(page, index, time.monotonic())
    try:
        answer = answer_of(scorer(item))
    except Exception as error:  # noqa: BLE001  a scorer may raise anything; only this item fails
        answer = _refusal_of(error)
    if os.getpid() != process:
        # The scorer forked and its child returned: the child must not answer as well.
        os._exit(0)
    return answer


def _refusal_of(error: Exception) -> ScorerRefusal:
    """Return the exception and its place, cutting the message rather than the place.

    A refusal of a built-in scorer ends with the remedy, and its place helps nobody.
    """
    if isinstance(error, SluiceError):
        return ScorerRefusal(encodable(str(error)[:MAX_DETAIL_CHARS]))
    place = place_of(error)
    text = f"{type(error).__name__}: {error}"[: MAX_DETAIL_CHARS - len(place)]
    frames = tuple(map(encodable, frame_texts(error)))
    return ScorerRefusal(encodable(f"{text}{place}"), frames)


def last_frames(error: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """Return the scorer's frames, innermost first, without the frames that call it.

    Include frames of libraries only if there are no others.
    """
    own_folder = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (Path(frame.filename).name in _OWN and own_folder in Path(frame.filename).parents)
    ]
    of_author = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return tuple(reversed(of_author or frames))[:MAX_FRAMES]


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


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the message pipes to other descriptors, so that a scorer that prints or reads cannot
    touch them."""
    requests = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    # A child that the scorer forks, and perhaps forgets, must neither read nor answer.
    pipes = [requests.fileno(), replies.fileno()]
    os.register_at_fork(after_in_child=partial(_close_all, pipes))
    return requests, replies


def _close_all(descriptors: list[int]) -> None:
    while descriptors:  # emptied: a grandchild may use the same numbers for other files
        os.close(descriptors.pop())


def _messages(stream: BinaryIO, kind: type[MessageT]) -> Iterator[MessageT]:
    decoder = msgspec.msgpack.Decoder(kind)
    while header := stream.read(FRAME_HEADER.size):
        if len(header) < FRAME_HEADER.size:
            return
        (size,) = FRAME_HEADER.unpack(header)
        yield decoder.decode(stream.read(size))


def _send(stream: BinaryIO, message: msgspec.Struct) -> None:
    remaining = memoryview(frame(message))
    while remaining:
        remaining = remaining[stream.write(remaining) :]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
