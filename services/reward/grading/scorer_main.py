"""The process that runs scorers, so that a hang, a crash or a leak ends with it.

`scorer_worker` starts it as ``python -m services.reward.grading.scorer_main PARENT_PID PAGE_FD``.
It reads requests from standard input and answers on standard output; the scorer's own prints go to
standard error. It ends when its input ends or its parent dies. It imports no gRPC.

It bounds its own address space, open files, CPU time and output. The wall clock is watched from
outside, because a scorer that hangs in C code cannot be interrupted from within.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import reprlib
import resource
import select
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from services.reward.grading.messages import (
    FRAME_HEADER,
    PROGRESS_BYTES,
    ScorerAnswer,
    ScoreReply,
    ScoreRequest,
    ScorerInput,
    ScorerNumber,
    ScorerRefusal,
    ScorerSetup,
    SetupReply,
    frame,
    note_idle,
    note_progress,
)
from services.reward.grading.scorers.custom import load_custom_scorer
from services.reward.grading.scorers.program_tests import ProgramTests
from services.reward.grading.scorers.registry import Scorer, check_routes, scorer_for
from sluice.errors import SluiceError
from sluice.safe_text import encodable
from sluice.sandbox.choice import backend_of, limits_of, proven_sandbox

SCORE_KEY = "score"
ACCURACY_KEY = "acc"
PREDICTION_KEY = "pred"
MAX_KEYS = 64
MAX_KEY_CHARS = 128
MAX_PREDICTION_CHARS = 1000
MAX_DETAIL_CHARS = 500

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 150

_STDOUT, _STDERR = 1, 2
_CHUNK_BYTES = 1 << 16
_FLUSH_S, _FLUSH_PAUSE_S = 0.2, 0.001
MAX_MORE_PROCESSES = 1024
"""Processes that a scorer may start beyond those that its user runs now."""
MAX_MORE_PROCESSES_EVER = 65_536
"""The same, beyond those at the start: the most to which a scorer can raise its own limit."""
COUNTED_EVERY_S = 5.0
MAX_OPEN_FILES = 256
MAX_OUTPUT_BYTES = 64 * 2**10
CPU_SLACK_S = 10
_PR_SET_PDEATHSIG = 1
MAX_FRAMES = 3
MAX_LINE_CHARS = 120
_OWN = frozenset({"scorer_main.py", "custom.py"})
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
ItemScorer = Callable[[ScorerInput], object]
MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def answer_of(returned: object) -> ScorerAnswer:
    """Interpret a scorer's return value as verl's reward managers do
    (`verl/workers/reward_manager/naive.py`, `dapo.py`).

    A mapping gives its ``score``; its other numbers become metrics, and ``pred``, cut to 1000
    characters, the prediction. A number is both score and accuracy. A list or tuple counts by its
    first element. Missing, non-numeric, NaN or infinite scores are refused, and so are NaN or
    infinite metrics and mappings of more than 64 keys.
    """
    if isinstance(returned, Mapping):
        return _of_mapping(returned)
    value = returned[0] if isinstance(returned, list | tuple) and returned else returned
    score = _number(value)
    if score is None or not math.isfinite(score):
        return refusal(
            f"the scorer returned {_shown(returned)}, which is not a finite number; return a "
            "number, or a dict with 'score'"
        )
    return ScorerNumber(score, {ACCURACY_KEY: score})


def refusal(detail: str) -> ScorerRefusal:
    """Return why there is no number, in at most 500 characters."""
    return ScorerRefusal(encodable(detail[:MAX_DETAIL_CHARS]))


def _of_mapping(returned: Mapping[object, object]) -> ScorerAnswer:
    problem = _shape_problem(returned)
    if problem is not None:
        return refusal(problem)
    numbers = {encodable(str(key)): _number(value) for key, value in returned.items()}
    metrics = {key: value for key, value in numbers.items() if value is not None}
    metrics.pop(PREDICTION_KEY, None)
    score = metrics.pop(SCORE_KEY, None)
    if score is None or not math.isfinite(score):
        return refusal(
            f"the scorer's 'score' is {_shown(returned[SCORE_KEY])}, which is not a finite number"
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
        shown = ", ".join(sorted(map(str, islice(returned, 8))))
        return f"the scorer returned a dict without 'score' (keys: {shown})"
    return None


def _prediction(value: object) -> str | None:
    return None if value is None else encodable(str(value)[:MAX_PREDICTION_CHARS])


def _shown(value: object) -> str:
    """Return a short form, without spelling out a million elements first."""
    return _SHORT.repr(value)


def _number(value: object) -> float | None:
    """Return `value` as a float; ``None`` if it is no number. Text is never a number."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # has __float__, of any library's scalars
    except (TypeError, ValueError, OverflowError):
        return None


class OutputLimit:
    """Passes what scorers print to the log, at most `max_bytes` per request, and drops the rest.

    A scorer that prints without end would fill the disk that holds the log. `limited_output` makes
    one: it replaces standard output and error by a pipe.
    """

    def __init__(self, source: int, sink: int, max_bytes: int) -> None:
        self._source, self._sink, self._max_bytes = source, sink, max_bytes
        self._num_left = max_bytes
        self._passing = threading.Lock()

    def begin_request(self) -> None:
        """Allow as much again."""
        self._num_left = self._max_bytes

    def pass_on(self) -> None:
        """Read until all writers are gone."""
        while True:
            select.select([self._source], [], [])
            with self._passing:
                if not (chunk := os.read(self._source, _CHUNK_BYTES)):
                    return
                allowed = chunk[: self._num_left]
                if allowed and len(allowed) < len(chunk):
                    allowed += b"\n[the scorer prints more; it is dropped until the next request]\n"
                self._num_left -= min(len(chunk), self._num_left)
                _write(self._sink, allowed)

    def flush(self) -> None:
        """Wait until all prints are passed on; at most `_FLUSH_S`, since they may never end."""
        limit_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < limit_s:
            with self._passing:
                if not select.select([self._source], [], [], 0)[0]:
                    return
            time.sleep(_FLUSH_PAUSE_S)


@contextmanager
def limited_output(max_bytes: int) -> Iterator[OutputLimit]:
    """Limit standard output and error of this process while the block runs.

    The interpreter's report of a fatal signal goes to the log directly.
    """
    sink = os.dup(_STDERR)
    faulthandler.enable(sink)
    source, entrance = os.pipe()
    os.dup2(entrance, _STDOUT)
    os.dup2(entrance, _STDERR)
    os.close(entrance)
    limit = OutputLimit(source, sink, max_bytes)
    threading.Thread(target=limit.pass_on, name="scorer-output", daemon=True).start()
    try:
        yield limit
    finally:
        os.dup2(sink, _STDOUT)
        os.dup2(sink, _STDERR)


def _write(sink: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(sink, remaining) :]


def threads_of_user() -> int:
    """Return the threads of all processes of this user; 0 where there is no /proc."""
    found = 0
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue
    return found


class ProcessLimit:
    """Lets this process start `MAX_MORE_PROCESSES` more than its user has.

    The system counts the threads of the whole user, which a machine's other jobs add to, so the
    limit follows them. It does not count root's processes.

    Args:
        count: threads of the user; 0 where they cannot be counted, which limits nothing.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        count: Callable[[], int] = threads_of_user,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._clock = count, clock
        self._counted_at = clock()
        if num_threads := count():
            _allow(num_threads, num_threads + MAX_MORE_PROCESSES_EVER)

    def renew(self) -> None:
        """Count again, before a request, if the last count is older than `COUNTED_EVERY_S`."""
        if self._clock() - self._counted_at < COUNTED_EVERY_S:
            return
        self._counted_at = self._clock()
        if num_threads := self._count():
            _allow(num_threads)


def _allow(num_threads: int, most: int | None = None) -> None:
    """Set the limit. The hard limit is read each time: the scorer may have lowered it."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if most is not None:
        hard_limit = _at_most(hard_limit, most)
    allowed = _at_most(hard_limit, num_threads + MAX_MORE_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (allowed, hard_limit))


def _at_most(limit: int, value: int) -> int:
    return value if limit == resource.RLIM_INFINITY else min(limit, value)


def main(parent_pid: int, page_fd: int) -> int:
    """Serve until the input ends. Return the exit code."""
    requests, replies = _take_over_pipes()
    end_with_parent(parent_pid)
    page = mmap(page_fd, PROGRESS_BYTES)
    setup = next(_messages(requests, ScorerSetup), None)
    if setup is None:
        return 0
    limit_resources(setup.memory_bytes)
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
            _limit_cpu(setup.timeout_s * len(request.items))
            output.begin_request()
            answers = [_answer(scorer, item, i, page) for i, item in enumerate(request.items)]
            note_idle(page)
            output.flush()  # the process may be killed after its answer
            _send(replies, ScoreReply(request.number, tuple(answers)))
    return 0


def _chosen_scorer(setup: ScorerSetup) -> ItemScorer:
    if setup.custom_path is not None:
        custom = load_custom_scorer(setup.custom_path, setup.custom_name, setup.custom_kwargs)
        return lambda item: _graded(custom, item)
    if setup.reward_model is not None:
        # Loads http and ssl, which the other scorers do without.
        from services.reward.grading.scorers.reward_model import RewardModelScorer

        model = RewardModelScorer(setup.reward_model, setup.timeout_s)
        return lambda item: _graded(partial(model, question=item.question), item)
    check_routes(setup.routes)
    programs = _program_tests(setup)
    return lambda item: _graded(scorer_for(item.data_source, setup.routes, programs=programs), item)


def _program_tests(setup: ScorerSetup) -> ProgramTests | None:
    """Return what grades programs, in a sandbox that has run one; ``None``: none is configured."""
    if backend_of(setup.sandbox, setup.sandbox_fusion) is None:
        return None
    sandbox = proven_sandbox(setup.sandbox, setup.sandbox_fusion)
    return ProgramTests(sandbox, limits_of(setup.sandbox), setup.timeout_s)


def _graded(scorer: Scorer, item: ScorerInput) -> object:
    return scorer(
        data_source=item.data_source,
        solution_str=item.response,
        ground_truth=item.ground_truth,
        extra_info=item.extra_info,
    )


def _answer(scorer: ItemScorer, item: ScorerInput, index: int, page: mmap) -> ScorerAnswer:
    process = os.getpid()
    note_progress(page, index, time.monotonic())
    try:
        answer = answer_of(scorer(item))
    except Exception as error:  # noqa: BLE001  a scorer may raise anything; only this item fails
        answer = _refusal_of(error)
    if os.getpid() != process:
        # The scorer forked and let the copy come back: it must not answer as well.
        os._exit(0)
    return answer


def _refusal_of(error: Exception) -> ScorerRefusal:
    """Return the exception with its place, which a long message does not push out."""
    place = place_of(error)
    text = f"{type(error).__name__}: {error}"[: MAX_DETAIL_CHARS - len(place)]
    frames = tuple(map(encodable, frame_texts(error)))
    return ScorerRefusal(encodable(f"{text}{place}"), frames)


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


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the frames' pipes: a scorer that prints or reads must not touch them."""
    requests = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    # A copy that a scorer forks, and perhaps forgets, must neither ask nor answer.
    pipes = [requests.fileno(), replies.fileno()]
    os.register_at_fork(after_in_child=partial(_close_all, pipes))
    return requests, replies


def _close_all(descriptors: list[int]) -> None:
    while descriptors:  # emptied: a copy's copy may use the same numbers for other files
        os.close(descriptors.pop())


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the reward service dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def limit_resources(memory_bytes: int, open_files: int = MAX_OPEN_FILES) -> None:
    """Bound this process's address space and open files, for all that it will do."""
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_NOFILE, open_files)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    hard_limit = resource.getrlimit(limit)[1]
    if hard_limit != resource.RLIM_INFINITY:
        value = min(value, hard_limit)
    resource.setrlimit(limit, (value, value))


def _limit_cpu(seconds: float) -> None:
    """Allow `seconds` of CPU time from now on, and some slack; beyond it SIGXCPU ends us."""
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    allowed = int(time.process_time() + seconds) + CPU_SLACK_S
    if hard_limit != resource.RLIM_INFINITY:
        allowed = min(allowed, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard_limit))


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
