"""Texts about idle actions: the next action, its reason, and why none is due. For the dashboard, logs and agents.

The notices for the session's user are in `wording.notices`. Each sentence about an action is true both before and after
it.
"""

from __future__ import annotations

from gpushare_spawner.idle.policy import Decision, IdleAction, NoAction, Overdue
from gpushare_spawner.model.share import IdleCause, Share, Tier, UseRule
from gpushare_spawner.wording.amounts import duration, elapsed, gpu_share

_NO_ACTION = {
    NoAction.GPU_BUSY: "GPU busy",
    NoAction.KERNEL_BUSY: "a kernel is busy",
    NoAction.NO_FURTHER_ACTION: "the template has no further idle action",
    NoAction.ACTIVITY_UNKNOWN: "the hub has not reported the server's last activity",
    NoAction.TEMPLATE_GONE: "the template no longer exists",
    NoAction.NOT_YET: "not idle for long enough",
    NoAction.NOTICE_PERIOD: "the notice period is running",
    NoAction.NOT_NEEDED: "no spawn waits that can use its units",
    NoAction.KEPT: "its user keeps the share",
    NoAction.EXEMPT: "an admin has exempted it from idle actions",
    NoAction.YIELDS: "its units are kept for others, by their quotas",
    NoAction.USED_UP: "its budget is used up, and it works in GPU time that others leave",
}
_KERNELS_RUN = "Kernels keep running and keep their data."
_DATA_STAYS = f"{_KERNELS_RUN} GPU work runs at once; some seconds of it restore the share."
_VARIABLES_LOST = "Files stay. Variables in kernels are lost."


def why_none(reason: NoAction) -> str:
    """Return why no idle action is due, as a clause: "GPU busy"."""
    return _NO_ACTION[reason]


def explained(action: IdleAction, share: Share) -> str:
    """Return, in a few sentences, the effect of an idle action on a session with this share, and its reason."""
    after = duration(action.after)
    without = f"without GPU work of {least_use(action.short_of)}" if action.short_of else "without GPU work"
    if action.cause is IdleCause.BUDGET:
        return f"Its budget is used up. Its share ({share}) is released: {_LEFT_BY_OTHERS} {_KERNELS_RUN}"
    if action.cause is IdleCause.RECLAIM:
        return _reclaimed(action, share)
    match action.tier:
        case Tier.DOWNGRADED:
            left = gpu_share(action.units) + (f" on each of its {share.count} GPUs" if share.count > 1 else "")
            return f"After {after} {without}, this share is downgraded from {share} to {left}. {_DATA_STAYS}"
        case Tier.RELEASED:
            return f"After {after} {without}, this share ({share}) is released and lent. {_DATA_STAYS}"
        case _ if action.cause is IdleCause.MAX_AGE:
            return f"A server runs for at most {after}, busy or not, and is then stopped. {_VARIABLES_LOST}"
        case _:
            return (
                f"After {after} without GPU work, busy kernels or other activity, this server is stopped. "
                f"{_VARIABLES_LOST} Any activity keeps the server running."
            )


def least_use(rule: UseRule) -> str:
    """Return how much GPU work counts as use, as a phrase: "at least 5 s at a time or within 5 min"."""
    return f"at least {rule.min_use:g} s at a time or within {duration(rule.window)}"


def kept_by_short_work(rule: UseRule) -> str:
    """Return, for admins, that short GPU work does not count as use."""
    return f"Short GPU work recurs and would keep the share if it counted as use. Use is GPU work of {least_use(rule)}."


_LEFT_BY_OTHERS = "its GPU work uses what others leave."


def _reclaimed(action: IdleAction, share: Share) -> str:
    why = "Others are entitled to units of this session by their quotas."
    match action.tier:
        case Tier.STOPPED:
            stops = f"After {duration(action.after)} without activity, this server is stopped. {_VARIABLES_LOST}"
            return f"Somebody within their quota waits for this GPU. {stops}"
        case Tier.RELEASED:
            change = f"Its share ({share}) is released: {_LEFT_BY_OTHERS}"
        case _:
            left = gpu_share(action.units) + (f" on each of its {share.count} GPUs" if share.count > 1 else "")
            change = f"Its share is downgraded from {share} to {left}."
    return f"{why} {change} {_KERNELS_RUN}"


def decided(decision: Decision, share: Share) -> str:
    """Return the reason for a decision: why an action is due now, or why none is."""
    if decision.no_action is not None:
        return why_none(decision.no_action)
    return explained(decision.upcoming, share) if decision.upcoming is not None else ""


def upcoming(tier: Tier, units: int) -> str:
    """Return the next idle action in two or three words: "downgrade to 0.10 GPU"."""
    match tier:
        case Tier.DOWNGRADED:
            return f"downgrade to {gpu_share(units)}"
        case Tier.RELEASED:
            return "release of the share"
        case _:
            return "stop of the server"


def overdue(verdict: Overdue) -> str:
    """Return why a server is to be stopped or a user deleted, as a phrase: "no activity for 8 h"."""
    time = elapsed(verdict.seconds)
    return f"{time} old" if verdict.cause is IdleCause.MAX_AGE else f"no activity for {time}"
