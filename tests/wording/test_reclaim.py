"""What users read where a session over quota makes way for somebody in quota."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_spawner.idle.policy import IdleAction
from gpushare_spawner.model.share import IdleCause, Share, Tier
from gpushare_spawner.model.share_status import GpuStatus, PendingAction, ShareStatus
from gpushare_spawner.wording.idle_decisions import explained
from gpushare_spawner.wording.notices import TOAST_LETTERS, changed, notice
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
