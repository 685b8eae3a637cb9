"""The books as people read them."""

from __future__ import annotations

from sluice.report.summary import account_views
from tests.support.run_folder import ACCOUNTING, ACCOUNTS


def test_parts_come_by_size_and_what_is_next_to_nothing_is_left_out() -> None:
    accounting = {**ACCOUNTS, **ACCOUNTING, "tokens/stale": 1.0}
    tokens, trainer, rollout = account_views(accounting)
    assert [part.name for part in tokens.parts] == ["trained", "filtered all right", "pending"]
    assert [part.share for part in tokens.parts] == [0.6, 0.25, 0.15]
    assert tokens.total_text == "3,000"
    assert trainer.parts_text == "training 50.0 %, waiting for batch 37.5 %; residual 12.5 %"
    assert (rollout.title, rollout.total_text, rollout.residual) == ("rollout", "10 s", 0.0)


def test_an_account_that_is_not_there_is_not_shown() -> None:
    assert account_views({}) == ()
    assert account_views(ACCOUNTS) == ()
    without_tokens = {name: n for name, n in ACCOUNTING.items() if not name.startswith("tokens")}
    assert [view.title for view in account_views(without_tokens)] == ["trainer", "rollout"]


def test_the_age_of_an_account_that_is_not_of_now_is_told() -> None:
    accounting = {"generated_tokens": 4.0, "tokens_residual": 0.0, "tokens/stale": 4.0}
    (fresh,) = account_views({**accounting, "tokens_age_s": 0.2})
    assert fresh.parts_text == "stale 100.0 %; residual 0.0 %"
    (old,) = account_views({**accounting, "tokens_age_s": 34.4})
    assert (old.parts_text, old.age_s) == ("stale 100.0 %; residual 0.0 %, 34 s ago", 34.4)


def test_nothing_at_all_has_no_shares() -> None:
    (view,) = account_views({"generated_tokens": 0.0, "tokens_residual": 0.0, "tokens/stale": 0.0})
    assert view.parts_text == "none; residual 0.0 %"
