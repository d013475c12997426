"""What happened at an instant: an action, or a spawn that got its GPU. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CORDON, DRAIN, CORDON_ENDED, DRAIN_ENDED = "cordon", "drain", "cordon-ended", "drain-ended"
OF_NODES = (CORDON, DRAIN, CORDON_ENDED, DRAIN_ENDED, "uncordon")  # the last: of histories before 0.2
"""Actions on a GPU or node. All others are on sessions or spawns."""


@dataclass(frozen=True)
class Action:
    """What was done to a session, by the culler, its user, or an admin."""

    at: float
    """Seconds since the epoch."""
    action: str
    """A tier for idle actions; "restored", "keep", "drain" and so on for others."""
    actor: str
    """The name of a user; "culler", "agent"."""
    user: str = ""
    server: str = ""
    template: str = ""
    group: str = ""
    node: str = ""
    units: int = 0
    """What the session holds afterwards, on each of its GPUs."""
    cause: str = ""
    """The rule behind an idle action, see `model.idle_cause`."""
    reason: str = ""
    """A sentence with figures."""
    dry_run: bool = False
    """It was decided, and not carried out."""


class Outcome(StrEnum):
    """How a wait for a GPU ended."""

    STARTED = "started"
    GAVE_UP = "gave-up"
    """The start was cancelled, or failed."""


@dataclass(frozen=True)
class Wait:
    """A spawn's wait for a GPU."""

    began_at: float
    """Seconds since the epoch."""
    seconds: float
    outcome: Outcome
    user: str
    server: str = ""
    template: str = ""
    group: str = ""


@dataclass(frozen=True)
class BegunRestart:
    """A restart of a server with a template that is under way."""

    at: float
    """When the service decided to stop the server: seconds since the epoch."""
    user: str
    server: str
    node: str
    """Of the old server."""
    group: str
    old_template: str
    template: str
    """The template to start with."""
    actor: str
    options: Mapping[str, object] = field(hash=False)
    """The user options to start with."""
    old_options: Mapping[str, object] = field(hash=False)
