"""The run's books as people read them: parts by size, with their shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AccountView", "Part", "account_views"]

# Title, prefix of the parts, name of the total, name of the residual.
_ACCOUNTS = (
    ("tokens", "tokens/", "generated_tokens", "tokens_residual"),
    ("trainer", "trainer_s/", "trainer_wall_s", "trainer_seconds_residual"),
    ("rollout", "rollout_s/", "rollout_wall_s", "rollout_seconds_residual"),
)
_MIN_SHARE = 0.0005  # less is shown as 0.0 %
_MIN_AGE_S = 0.5  # less is shown as 0 s


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an account; `share` is of its total."""

    name: str
    amount: float
    share: float


@dataclass(frozen=True, slots=True)
class AccountView:
    """One account: `parts` by size, those of less than 0.05 % left out.

    `total`, amounts and `residual` are tokens, or seconds of the trainer or of all replicas, as
    they were `age_s` seconds ago.
    """

    title: str
    total: float
    parts: tuple[Part, ...]
    residual: float
    residual_share: float
    age_s: float = 0.0

    @property
    def total_text(self) -> str:
        """The total with its unit."""
        return f"{self.total:,.0f}" + ("" if self.title == "tokens" else " s")

    @property
    def parts_text(self) -> str:
        """All parts and the residual, such as ``trained 61.2 %, pending 3.0 %; residual 0.0 %``.

        The age is told where it is half a second or more.
        """
        parts = ", ".join(f"{part.name} {_percent(part.share)}" for part in self.parts)
        age = f", {self.age_s:.0f} s ago" if self.age_s >= _MIN_AGE_S else ""
        return f"{parts or 'none'}; residual {_percent(self.residual_share)}{age}"


def account_views(accounts: Mapping[str, float]) -> tuple[AccountView, ...]:
    """The accounts that are there.

    Args:
        accounts: by the names of `accounts.json`; one that lacks an account's total or residual,
            as of a run whose reward service told no tokens, gives no view of it.
    """
    return tuple(
        AccountView(
            title,
            accounts[total],
            _parts(accounts, prefix, accounts[total]),
            accounts[residual],
            accounts.get(f"{residual}_share", 0.0),
            accounts.get(f"{title}_age_s", 0.0),
        )
        for title, prefix, total, residual in _ACCOUNTS
        if total in accounts and residual in accounts
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _parts(accounts: Mapping[str, float], prefix: str, total: float) -> tuple[Part, ...]:
    parts = [
        Part(name.removeprefix(prefix).replace("_", " "), amount, amount / total)
        for name, amount in accounts.items()
        if name.startswith(prefix) and total > 0
    ]
    shown = (part for part in parts if part.share >= _MIN_SHARE)
    return tuple(sorted(shown, key=lambda part: (-part.share, part.name)))
