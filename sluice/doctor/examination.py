"""Run every check in parallel, each with a deadline; one that breaks hides no other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sluice.doctor import configuration, files, packages
from sluice.doctor.configuration import check_certificates, check_configuration
from sluice.doctor.files import check_disk
from sluice.doctor.finding import Examined, Finding, fine, problem, problem_of_sentence
from sluice.doctor.machine import (
    check_gpu_count,
    check_memory,
    check_npus,
    check_open_files,
    check_shared_memory,
    check_threads,
)
from sluice.doctor.network import check_clock, check_network, check_ports
from sluice.doctor.packages import (
    check_engine,
    check_extras,
    check_generated_code,
    check_python,
    check_requirements,
)
from sluice.errors import SluiceError

Examine = Callable[[Examined], Iterable[Finding]]

DEADLINE_S = 30.0
NOT_EXAMINED = "it was not examined, so nothing is known about it"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at.

    Attributes:
        name: for people and machines.
        about: what it looks at, in a few words.
        examine: gathers facts and judges them.
        needs_run: whether it says nothing without a run's configuration.
        deadline_s: seconds it may take.
    """

    name: str
    about: str
    examine: Examine
    needs_run: bool = False
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True, slots=True)
class Result:
    """All that a check has found."""

    check: Check
    findings: tuple[Finding, ...]


def examine(examined: Examined, checks: Sequence[Check]) -> Iterator[Result]:
    """Yields the result of each check, in their order, as soon as it and those before it are there.

    All start at once. One that is late is told as a problem and left behind: its thread may wait
    for a file system or a peer that never answers, and ends with the process.
    """
    asked = [check for check in checks if examined.has_run or not check.needs_run]
    start_s = time.monotonic()
    answers = [_started(check, examined) for check in asked]
    for check, answer in zip(asked, answers, strict=True):
        left_s = max(0.0, start_s + check.deadline_s - time.monotonic())
        try:
            yield Result(check, answer.get(timeout=left_s))
        except queue.Empty:
            yield Result(check, (_late(check),))


def _started(check: Check, examined: Examined) -> queue.SimpleQueue[tuple[Finding, ...]]:
    answer: queue.SimpleQueue[tuple[Finding, ...]] = queue.SimpleQueue()
    threading.Thread(
        target=lambda: answer.put(_findings(check, examined)), name=check.name, daemon=True
    ).start()
    return answer


def _findings(check: Check, examined: Examined) -> tuple[Finding, ...]:
    try:
        return tuple(check.examine(examined)) or (fine(f"nothing to say about {check.about}"),)
    except SluiceError as error:
        return (problem_of_sentence(str(error), ""),)
    except Exception as error:  # noqa: BLE001 - a defect of one check must not hide the others
        what = f"{check.about}: {type(error).__name__}: {error}"
        return (problem(what, NOT_EXAMINED, "look at it by hand, and report the message"),)


def _late(check: Check) -> Finding:
    return problem(
        f"{check.about}: no answer within {check.deadline_s:g} s",
        NOT_EXAMINED,
        "look for a file system, driver or peer that hangs, and repeat when the machine is idle",
    )


CHECKS: tuple[Check, ...] = (
    Check("python", "the interpreter", check_python),
    Check("packages", "what every process imports", check_requirements),
    Check("generated-code", "gRPC and protobuf", check_generated_code),
    Check(
        "torch",
        "torch, the driver and the GPUs",
        packages.check_torch,
        deadline_s=packages.TORCH_DEADLINE_S,
    ),
    Check("npu", "NPUs, CANN and their variables", check_npus),
    Check("open-files", "the limit of open files", check_open_files),
    Check("network", "the networks of collectives", check_network),
    Check("clock", "this machine's clock", check_clock),
    Check("configuration", "the configuration's rules", check_configuration, needs_run=True),
    Check("extras", "optional packages", check_extras, needs_run=True),
    Check("gpus", "GPUs for every process", check_gpu_count, needs_run=True),
    Check("engine", "the inference engine", check_engine, needs_run=True),
    Check(
        "model",
        "the model's folder",
        files.check_model,
        needs_run=True,
        deadline_s=files.MODEL_DEADLINE_S,
    ),
    Check(
        "data",
        "the files of prompts",
        files.check_data,
        needs_run=True,
        deadline_s=files.DATA_DEADLINE_S,
    ),
    Check(
        "reward",
        "what grades responses",
        configuration.check_reward,
        needs_run=True,
        deadline_s=configuration.REWARD_DEADLINE_S,
    ),
    Check("memory", "the host's memory", check_memory, needs_run=True),
    Check("cpus", "CPUs for every thread", check_threads, needs_run=True),
    Check("shared-memory", "shared memory (/dev/shm)", check_shared_memory, needs_run=True),
    Check("disk", "room for checkpoints", check_disk, needs_run=True),
    Check("ports", "fixed ports", check_ports, needs_run=True),
    Check("security", "certificates and tokens", check_certificates, needs_run=True),
)
