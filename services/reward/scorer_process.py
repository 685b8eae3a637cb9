"""A process that runs scorers, so that a hang, a crash or a leak can be ended by killing it.

Started by `scorer_worker` as ``python -m services.reward.scorer_process PARENT_PID PAGE_FD``. It
takes requests from standard input and answers on standard output (whatever the scorer prints goes
to standard error), and ends when its input ends or its parent dies. Imports no gRPC.

It bounds its own address space, open files, CPU time and output; the wall clock is watched from
outside, because a scorer that hangs in C code cannot be interrupted from within.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from mmap import mmap
from typing import BinaryIO, TypeVar

import msgspec

from services.reward.scorer_answer import answer_of, refusal
from services.reward.scorer_messages import (
    FRAME_HEADER,
    PROGRESS_BYTES,
    ScoreItem,
    ScorerAnswer,
    ScoreReply,
    ScoreRequest,
    ScorerSetup,
    SetupReply,
    frame,
    note_idle,
    note_progress,
)
from services.reward.scorer_output import limited_output
from services.reward.scorer_process_limit import ProcessLimit
from services.reward.scorers.custom import load_custom_scorer
from services.reward.scorers.registry import Scorer, check_routes, scorer_for
from sluice.errors import SluiceError

MAX_OPEN_FILES = 256
MAX_OUTPUT_BYTES = 64 * 2**10
CPU_SLACK_S = 10
_PR_SET_PDEATHSIG = 1

ItemScorer = Callable[[ScoreItem], object]
MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def main(parent_pid: int, page_fd: int) -> int:
    """Serve until the input ends. Returns the exit code."""
    requests, replies = _take_over_pipes()
    _end_with_parent(parent_pid)
    page = mmap(page_fd, PROGRESS_BYTES)
    setup = next(_messages(requests, ScorerSetup), None)
    if setup is None:
        return 0
    _limit_resources(setup.memory_bytes)
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
            _send(replies, ScoreReply(request.number, tuple(answers)))
    return 0


def _chosen_scorer(setup: ScorerSetup) -> ItemScorer:
    if setup.custom_path is not None:
        custom = load_custom_scorer(setup.custom_path, setup.custom_name, setup.custom_kwargs)
        return lambda item: _graded(custom, item)
    if setup.reward_model is not None:
        # Loads http and ssl, which the other scorers do without.
        from services.reward.scorers.reward_model import RewardModelScorer

        model = RewardModelScorer(setup.reward_model, setup.timeout_s)
        return lambda item: _graded(partial(model, question=item.question), item)
    check_routes(setup.routes)
    return lambda item: _graded(scorer_for(item.data_source, setup.routes), item)


def _graded(scorer: Scorer, item: ScoreItem) -> object:
    return scorer(
        data_source=item.data_source,
        solution_str=item.response,
        ground_truth=item.ground_truth,
        extra_info=item.extra_info,
    )


def _answer(scorer: ItemScorer, item: ScoreItem, index: int, page: mmap) -> ScorerAnswer:
    process = os.getpid()
    note_progress(page, index, time.monotonic())
    try:
        answer = answer_of(scorer(item))
    except Exception as error:  # noqa: BLE001  a scorer may raise anything; it is this item's fate
        answer = refusal(f"{type(error).__name__}: {error}")
    if os.getpid() != process:
        # The scorer forked and let the copy come back: it must not answer as well.
        os._exit(0)
    return answer


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the frames' pipes to ourselves: a scorer that prints or reads must not touch them."""
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


def _end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the reward service dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _limit_resources(memory_bytes: int) -> None:
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
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
