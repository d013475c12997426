"""What users read where a session over quota makes way for somebody in quota."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpushare_spawner.idle.policy import IdleAction
from gpushare_spawner.model.controls import NO_CONTROLS, Message, MessageCause
from gpushare_spawner.model.quota import BudgetState
from gpushare_spawner.model.share import IdleCause, Share, Tier
from gpushare_spawner.model.share_status import ControlsStatus, GpuStatus, PendingAction, ShareStatus
from gpushare_spawner.wording.idle_decisions import explained
from gpushare_spawner.wording.notices import TOAST_LETTERS, changed, notice
from gpushare_spawner.wording.service import budget_left, budget_message
from gpushare_spawner.wording.share_status import explanation, line, page

GPU = GpuStatus("GPU-0", 0, 0, 2**34, "none", 1, 0)
WAITS = "by quota, others are entitled to its units"
SOMEBODY_WAITS = "somebody within their quota waits for this GPU"


def status(**changes: Any) -> ShareStatus:
    values: dict[str, Any] = {"share_units": 50, "effective_units": 50, "guaranteed_units": 50, "gpus": (GPU,)}
    return ShareStatus(**values | changes)


@pytest.mark.parametrize(
    ("tier", "units", "said"),
    [
        (
            Tier.DOWNGRADED, 20,
            f"Your GPU share will be downgraded to 0.20 GPU at {{time}}: {WAITS}. Your data is kept.",
        ),
        (
            Tier.RELEASED, 0,
            f"Your GPU share will be released at {{time}}: {WAITS}. Data is kept; cells use what others leave.",
        ),
        (
            Tier.STOPPED, 0,
            f"Your server will stop at {{time}}: it is idle, and {SOMEBODY_WAITS}. Save your work, or run a cell.",
        ),
    ],
)  # fmt: skip
def test_the_notice_says_who_waits_and_fits_a_toast(tier: Tier, units: int, said: str) -> None:
    told = PendingAction(tier, 1000.0, units, IdleCause.RECLAIM)
    assert notice(status(), told) == said
    assert len(said.replace("{time}", "12:00 PM")) <= TOAST_LETTERS


@pytest.mark.parametrize(
    ("tier", "units", "change", "state"),
    [
        (
            Tier.DOWNGRADED, 20,
            f"Your GPU share was downgraded to 0.20 GPU: {WAITS}. Your data is kept.",
            f"Your GPU share is downgraded from 0.50 GPU to 0.20 GPU: {WAITS}.",
        ),
        (
            Tier.RELEASED, 0,
            f"Your GPU share was released: {WAITS}. Data is kept; cells use what others leave.",
            f"Your GPU share (0.50 GPU) is released: {WAITS}. GPU cells use what others leave.",
        ),
    ],
)  # fmt: skip
def test_no_cell_is_promised_to_restore_a_share_that_is_kept_for_others(
    tier: Tier, units: int, change: str, state: str
) -> None:
    now = status(tier=tier, effective_units=units, guaranteed_units=units, yields=True)
    assert changed(now) == change
    assert len(changed(now)) <= TOAST_LETTERS
    assert explanation(now).startswith(
        f"{state} Variables and GPU memory are kept. You get the share back when the units are free."
    )
    for text in (changed(now), explanation(now), page(now, 0.0), line(now)):
        assert "restore" not in text


@pytest.mark.parametrize(
    ("tier", "units", "after", "said"),
    [
        (Tier.DOWNGRADED, 20, 0.0, "Its share is downgraded from 0.50 GPU to 0.20 GPU. Kernels keep running"),
        (Tier.RELEASED, 0, 0.0, "Its share (0.50 GPU) is released: its GPU work uses what others leave. Kernels keep"),
        (Tier.STOPPED, 0, 1800.0, "After 30 min without activity, this server is stopped. Files stay."),
    ],
)
def test_the_reason_says_that_the_session_is_over_quota(tier: Tier, units: int, after: float, said: str) -> None:
    text = explained(IdleAction(tier, units, 0.0, after, IdleCause.RECLAIM), Share(50))
    why = "Others are entitled to units of this session by their quotas. "
    assert text.startswith("Somebody within their quota waits for this GPU. " if tier is Tier.STOPPED else why)
    assert said in text


def test_whole_gpus_are_reduced_on_each() -> None:
    text = explained(IdleAction(Tier.DOWNGRADED, 20, 0.0, 0.0, IdleCause.RECLAIM), Share(100, 2))
    assert "from 2 GPUs to 0.20 GPU on each of its 2 GPUs" in text


USED_UP = "your budget of GPU-hours is used up"


def test_a_used_up_budget_is_announced_and_said_in_the_status() -> None:
    action = PendingAction(Tier.RELEASED, 1000.0, 0, IdleCause.BUDGET)
    text = notice(status(), action)
    assert text == f"Your GPU share will be released at {{time}}: {USED_UP}. Data is kept; cells use what others leave."
    assert len(text.replace("{time}", "12:00 PM")) <= TOAST_LETTERS
    left = ControlsStatus(budget="none of 4.00 GPU-hours left in 24 h, more from 2026-11-03 14:00 UTC on")
    now = status(tier=Tier.RELEASED, effective_units=0, yields=True, background=True, controls=left)
    assert changed(now) == f"Your GPU share was released: {USED_UP}. Data is kept; cells use what others leave."
    assert "You get the share back when hours are left again." in explanation(now)
    rows = page(now, 1_793_700_000.0)
    assert re.search(r"^budget +none of 4.00 GPU-hours left in 24 h, more from", rows, re.MULTILINE)
    assert f"released; {USED_UP}" in rows
    decided = explained(IdleAction(Tier.RELEASED, 0, 0.0, 0.0, IdleCause.BUDGET), Share(50))
    assert decided.startswith("Its budget is used up. Its share (0.50 GPU) is released: its GPU work uses what others")


def test_a_message_about_the_budget_is_no_message_of_an_admin() -> None:
    budget = Message(text="1 of 4 GPU-hours left in 24 h", by="", at=5.0, cause=MessageCause.BUDGET)
    other = Message(text="Save your work.", by="root", at=6.0)
    controls = ControlsStatus.of(NO_CONTROLS, (budget, other), now=10.0)
    assert (controls.budget, [shown.text for shown in controls.messages]) == (budget.text, [other.text])


def test_what_is_left_is_written_by_window_and_owner() -> None:
    day = BudgetState(account="group:optics", user="ann", hours=5, granted=1, used=3.5, window=86400.0)
    granted = "1.50 of 5.00 GPU-hours left in 24 h (group optics, for you), 1.00 of them granted by an admin"
    assert budget_left(day) == granted
    term = BudgetState(account="user:ann", hours=2000, used=2000, ends_at=1_801_440_000.0, more_at=1_801_440_000.0)
    assert budget_left(term) == "none of 2,000 GPU-hours left until 2027-02-01 00:00 UTC"
    assert budget_message([day, term]) == (
        f"none of 2,000 GPU-hours left until 2027-02-01 00:00 UTC, more from 2027-02-01 00:00 UTC on; {granted}"
    )
