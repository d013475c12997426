"""A session's share against its pod's annotations: the service asks for another share there, the agent decides.

The agent's record is the truth of the share: annotations that say another one are patched. Does not patch itself:
annotation_writer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpushare_spawner.agent.kubernetes.devices.device_owners import HeldDevices
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.session_record import SessionRecord
from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.kubernetes import PodSession, ShareChangeAnswer
from gpushare_spawner.model.protocol.control import ControlRefused, Failure, ResizeRequest


class Changes(Protocol):
    """What changes shares: sessions.share_changes.ShareChanges."""

    def resize(self, session: Session, request: ResizeRequest) -> None:
        """Change a session's share. Raises ControlRefused."""


class ShareAnnotations:
    """Carries out the changes of shares that the service wrote to pods' annotations."""

    def __init__(self, changes: Changes, held: HeldDevices, save: Callable[[Session], None]) -> None:
        """`held`: the kubelet may have given units away of which no session knows yet. `save` writes a record."""
        self._changes = changes
        self._held = held
        self._save = save

    def follow(self, session: Session, said: PodSession) -> None:
        """Decide on what is asked; an ask that was answered is none."""
        hold, change = session.record.pod, said.resize
        if hold is None or change is None or (hold.resized is not None and hold.resized.number == change.number):
            return
        before = session.record.request.share_units
        refused: Failure | None = None
        try:
            self._check(session, change.share_units)
            self._changes.resize(session, change.request(session.id))
        except ControlRefused as error:
            refused = Failure(code=error.code, message=error.message)
        else:
            if hold.placed_units is None:
                hold.placed_units = before
        hold.resized = ShareChangeAnswer(number=change.number, refused=refused)
        self._save(session)

    def _check(self, session: Session, units: int) -> None:
        free = self._held.free_for(session)
        if units > session.record.request.share_units and units > free:
            raise ControlRefused(
                Failure(
                    code="no-capacity",
                    message=f"session {session.id} can have {free} units on its GPUs now, and not {units}: others use "
                    "the devices",
                )
            )


def share_patch_wanted(said: PodSession, record: SessionRecord) -> dict[str, str | None]:
    """Return the part of a pod's patch that makes its annotations say the record's share; empty: none is needed."""
    patch: dict[str, str | None] = {}
    hold, request = record.pod, record.request
    if hold is None or hold.resized is None:
        return patch
    placed = hold.placed_units or request.share_units
    have = (said.share_units, said.placed_units or said.share_units, said.memory_limit)
    if have != (request.share_units, placed, str(request.memory_limit)):
        patch |= kubernetes.share_patch(request.share_units, placed, str(request.memory_limit))
        # all of them at once: units beyond the share would make the annotations invalid
        patch |= kubernetes.tier_patch(
            record.tier, record.tier_since, record.effective_units, yields_until=record.yields_until, use=record.use
        )
        patch |= kubernetes.borrowed_patch(record.borrowed_units)
    if said.resized != hold.resized:
        patch |= kubernetes.resized_patch(hold.resized)
        if said.resize is not None and said.resize.number != hold.resized.number:
            del patch[kubernetes.RESIZE]  # a newer one
    return patch
