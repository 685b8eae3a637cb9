"""The result of a run under chaos: one object for machines, one table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from tools.chaos.bookkeeping import AccountingVerdict
from tools.chaos.injection import Injected
from tools.chaos.late_waits import LateWait
from tools.chaos.recovery import Yield, longest_pause_s, percentile, recovery_s, tokens_per_s
from tools.chaos.schedule import FaultKind

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Times:
    """Monotonic seconds: calm steps, then faults, then the end of watching."""

    calm_from_s: float
    faults_from_s: float
    end_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found."""

    injected: Sequence[Injected]
    steps_s: Sequence[float]
    groups: Sequence[Yield]
    times: Times
    accounting: AccountingVerdict
    lost_by_service: float
    digest_mismatches: Sequence[tuple[str, int]]
    late: Sequence[LateWait]
    exit_code: int
    failure: str
    final_accuracy: float | None
    starts: Mapping[str, int]
    tracebacks: Mapping[str, int]
    client_prompts: Mapping[str, int]

    @property
    def prompts_lost(self) -> int:
        """Prompts lost by the accounting, and by the service's own count."""
        return len(self.accounting.lost) + int(self.lost_by_service)

    @property
    def full_rate(self) -> float:
        """Tokens a second before all faults."""
        return tokens_per_s(self.groups, self.times.calm_from_s, self.times.faults_from_s)

    @property
    def is_clean(self) -> bool:
        """Whether everything that has to be zero is."""
        wrong = (
            self.prompts_lost,
            len(self.accounting.doubled),
            len(self.digest_mismatches),
            len(self.late),
            self.exit_code,
            self.failure,
        )
        return not any(wrong)

    def recoveries(self) -> list[tuple[FaultKind, float | None]]:
        """Return seconds to full throughput of each fault that was injected, in their order."""
        times = self.times
        return [
            (
                one.fault.kind,
                recovery_s(
                    self.groups,
                    one.at_s,
                    full_rate=self.full_rate,
                    window_s=times.window_s,
                    end_s=times.end_s,
                ),
            )
            for one in self.injected
            if not one.skipped
        ]


def json_report(findings: Findings, *, minutes: float, seed: int) -> dict[str, object]:
    """Return the last line of the output."""
    recoveries = findings.recoveries()
    known = [seconds for _, seconds in recoveries if seconds is not None]
    return {
        "minutes": minutes,
        "seed": seed,
        "faults": dict(sorted(Counter(str(kind) for kind, _ in recoveries).items())),
        "skipped": _skipped(findings.injected),
        "prompts_lost": findings.prompts_lost,
        "prompts_doubled": len(findings.accounting.doubled),
        "digest_mismatches": len(findings.digest_mismatches),
        "late_waits": len(findings.late),
        "recovery_s": {
            "p50": _rounded(percentile(known, 0.5)),
            "p95": _rounded(percentile(known, 0.95)),
            "not_seen": len(recoveries) - len(known),
        },
        "trainer_stall_s": _rounded(_stall_s(findings)),
        "tokens_per_s_before": _rounded(findings.full_rate),
        "final_accuracy": findings.final_accuracy,
        "steps_trained": len(findings.steps_s),
        "steps_without_dump": findings.accounting.unseen_steps,
        "client_prompts": dict(findings.client_prompts),
        "starts": dict(sorted(findings.starts.items())),
        "tracebacks": dict(findings.tracebacks),
        "exit_code": findings.exit_code,
        "failure": findings.failure,
    }


def print_tables(findings: Findings, console: Console) -> None:
    """Print faults by kind with recoveries, then what has to be zero, with examples."""
    by_kind: dict[FaultKind, list[float | None]] = {}
    for kind, seconds in findings.recoveries():
        by_kind.setdefault(kind, []).append(seconds)
    faults = Table("fault", "injected", "s to 95 % (median)", "worst", "not seen before the end")
    for kind in sorted(by_kind):
        known = [seconds for seconds in by_kind[kind] if seconds is not None]
        faults.add_row(
            kind,
            str(len(by_kind[kind])),
            _shown(percentile(known, 0.5)),
            _shown(percentile(known, 1.0)),
            str(len(by_kind[kind]) - len(known)),
        )
    console.print(faults)
    for name, why in _skipped(findings.injected).items():
        console.print(f"skipped {name}: {why}", markup=False, highlight=False)
    zeros = Table("has to be 0", "found", "examples")
    for name, count, examples in _zeros(findings):
        zeros.add_row(name, str(count), "; ".join(examples[:3]))
    zeros.add_row("exit code", str(findings.exit_code), findings.failure)
    console.print(zeros)
    console.print(f"longest time without a step: {_stall_s(findings):.1f} s", highlight=False)


def _zeros(findings: Findings) -> list[tuple[str, int, list[str]]]:
    accounting = findings.accounting
    late = [
        f"{one.wait.service} for {one.wait.peer} ({one.wait.phase}) "
        f"{one.wait.seconds:.0f} s of {one.allowed_s:.0f}"
        for one in findings.late
    ]
    return [
        ("prompts lost", findings.prompts_lost, _reported(accounting.lost)),
        ("prompts trained twice", len(accounting.doubled), _reported(accounting.doubled)),
        (
            "digests that differ",
            len(findings.digest_mismatches),
            [f"version {version}" for _, version in findings.digest_mismatches],
        ),
        ("waits past their deadline", len(late), late),
    ]


def _reported(found: Mapping[str, str]) -> list[str]:
    return [f"{prompt_id}: {what}" for prompt_id, what in found.items()]


def _skipped(injected: Sequence[Injected]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for one in injected:
        if one.skipped:
            found.setdefault(str(one.fault.kind), []).append(one.skipped)
    return {kind: f"{len(why)} times: {why[0]}" for kind, why in sorted(found.items())}


def _stall_s(findings: Findings) -> float:
    times = findings.times
    return longest_pause_s(findings.steps_s, times.faults_from_s, times.end_s)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
