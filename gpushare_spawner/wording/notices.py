"""Notices for a session's user: in JupyterLab, in notifiers' messages, and on the hub's pages.

- In JupyterLab: a notice before an idle action, and each change of the tier. ``{time}`` in a text stands for an
  instant, because only the reader's browser or terminal knows the reader's time zone.
- For a user with a closed notebook tab: Jinja templates, which an admin can replace. docs/reference/notifiers.md lists
  the names in them.
- On the hub's pages: why a server was stopped. For a stop by an admin, see `wording.actions.stopped_by`.
"""

from __future__ import annotations

from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.share_status import PendingAction, ShareStatus
from gpushare_spawner.wording.amounts import duration, gpu_share, share_of

TOAST_LETTERS = 140
"""Maximum characters of a notification. JupyterLab truncates longer ones."""


def notice(status: ShareStatus, action: PendingAction) -> str:
    """Return the action at ``{time}`` and how to prevent it, in at most TOAST_LETTERS characters."""
    keep = "Run a GPU cell to keep it."
    if action.cause is IdleCause.BUDGET and action.tier is not Tier.STOPPED:
        return f"Your GPU share will be released at {{time}}: {USED_UP}. {_RELEASED_FOR_OTHERS}"
    if action.cause is IdleCause.RECLAIM:
        return _reclaim_notice(status, action)
    match action.tier:
        case Tier.DOWNGRADED:
            smaller = gpu_share(action.effective_units, status.gpu_count, status.last_units)
            return f"Your GPU share will be downgraded to {smaller} at {{time}}: {_idle(status)}. {keep}"
        case Tier.RELEASED:
            return f"Your GPU share will be released at {{time}}: {_idle(status)}. {keep}"
        case Tier.STOPPED:
            return _stop_notice(action)
        case _:
            smaller = gpu_share(action.effective_units, status.gpu_count, status.last_units)
            return f"Your GPU share will be {smaller} at {{time}}."


def reclaimed(status: ShareStatus) -> str:
    """Return that owners have reclaimed borrowed units, in at most TOAST_LETTERS characters; empty if they have not."""
    if not status.known or status.tier is not Tier.ACTIVE or status.borrowed_now >= status.borrowed_units:
        return ""
    now = share_of(units for units, _ in status.units_now)
    share = gpu_share(status.share_units, status.gpu_count, status.last_units)
    # units that are still borrowed are not guaranteed
    left = f"You have {now} of your {share} now" if status.borrowed_now else f"{now} of your {share} is guaranteed now"
    change = f"{left}: others reclaimed the rest."
    return f"{change} The dashboard says whether a restart helps."


def _idle(status: ShareStatus) -> str:
    """Return why the share is idle. Idle time counts from the last GPU work, or else from the server's start."""
    return "no GPU work since the start" if status.idle_seconds is None else "it is idle"


def while_idle(status: ShareStatus) -> str:
    """Return when the share was lowered. Its user or an admin may have lowered it."""
    return ": no GPU work since the start" if status.idle_seconds is None else " while it was idle"


def _reclaim_notice(status: ShareStatus, action: PendingAction) -> str:
    """Return the notice for a session over quota that makes way for others."""
    if action.tier is Tier.STOPPED:
        return f"Your server will stop at {{time}}: it is idle, and {SOMEBODY_WAITS}. Save your work, or run a cell."
    if not action.effective_units:
        return f"Your GPU share will be released at {{time}}: {WAITS}. {_RELEASED_FOR_OTHERS}"
    smaller = gpu_share(action.effective_units, status.gpu_count, status.last_units)
    return f"Your GPU share will be downgraded to {smaller} at {{time}}: {WAITS}. Your data is kept."


def _stop_notice(action: PendingAction) -> str:
    match action.cause:
        case IdleCause.MAX_AGE:
            limit = f"it has run for {duration(action.after_seconds)}, the limit here"
            why = limit if action.after_seconds else "it has run for as long as servers may run here"
            return f"Your server will stop at {{time}}: {why}. Save your work. You can start it again."
        case IdleCause.IDLE:
            idle = f" for {duration(action.after_seconds)}" if action.after_seconds else ""
            return f"Your server will stop at {{time}}: idle{idle}. Save your work, or run a cell to keep it running."
        case _:
            return "Your server will stop at {time}. Save your work."


WAITS = "by quota, others are entitled to its units"
"""Reason why units of a session over quota are reclaimed."""
USED_UP = "your budget of GPU-hours is used up"
"""Reason why a session has no units."""
SOMEBODY_WAITS = "somebody within their quota waits for this GPU"
"""Reason why a server over quota is stopped."""
_RELEASED_FOR_OTHERS = "Data is kept; cells use what others leave."


def changed(status: ShareStatus) -> str:
    """Return the sentences about a new tier, in at most TOAST_LETTERS characters."""
    gpus = status.gpu_count
    kept = "Your data is kept. GPU cells run at once and soon restore the share."
    if status.yields:
        if not status.effective_units:
            why = USED_UP if status.background else WAITS
            return f"Your GPU share was released: {why}. {_RELEASED_FOR_OTHERS}"
        smaller = gpu_share(status.effective_units, gpus, status.last_units)
        return f"Your GPU share was downgraded to {smaller}: {WAITS}. Your data is kept."
    match status.tier:
        case Tier.DOWNGRADED:
            smaller = gpu_share(status.effective_units, gpus, status.last_units)
            return f"Your GPU share was downgraded to {smaller}{while_idle(status)}. {kept}"
        case Tier.RELEASED:
            return f"Your GPU share was released{while_idle(status)}. {kept}"
        case _:
            return f"Your GPU share is restored: {gpu_share(status.share_units, gpus, status.last_units)}."


BYPASS_SUBJECT = "Your GPU session holds more GPU memory than it may"
DEFAULT_SUBJECT = (
    "{% if action == 'stop' %}Your notebook server will stop{% else %}Your GPU share will be {{ action }}d{% endif %} "
    "at {{ time }}"
)
DEFAULT_TEXT = """\
Hello {{ user }},

{% if action == 'stop' %}
your notebook server{% if server %} {{ server }}{% endif %} will stop at {{ time }}.
{% else %}
the GPU share of your notebook server{% if server %} {{ server }}{% endif %} will be {{ action }}d at {{ time }}.
{% endif %}
{{ explanation }}

{% if can_keep %}
To keep {% if action == 'stop' %}the server, open your notebook and run a cell{% else %}the share, open your notebook \
and run a cell that uses the GPU{% endif %}{% if dashboard %}, or keep the share on the dashboard{% endif %}.
{% endif %}
{% if dashboard %}
{{ dashboard }}
{% endif %}
"""
