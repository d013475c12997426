"""Advice on the size of users' shares, from the history's bursts. `arbiter.right_size` replays and decides.

`ShareAdvisor` computes the advice for one open session at a time, so that the service never uses much CPU time. The
form, JupyterLab, the history page and the REST API read the stored advice (`advice_of`), and wait for no replay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, Select, func, select

from gpushare_spawner.arbiter.right_size import (
    MOST_OTHER,
    MOST_OWN,
    NEAR,
    OtherShare,
    RecordedSession,
    Recording,
    advise,
    is_evidence,
)
from gpushare_spawner.background import in_daemon_thread
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import GpuReport, SessionReport
from gpushare_spawner.model.share import ADVICE_PERIOD, UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, ActionRefused, Target, current
from gpushare_spawner.service.actions.share import other_shares, templates_for
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.history.store import ADVICE, BURST, SUBJECT, USE, AdviceRecord, BurstRecord, HistoryFailed
from gpushare_spawner.service.reports import KnownReport
from gpushare_spawner.wording import service as words

log = logging.getLogger("gpushare.service.history")

STEP_EVERY, PART = 10.0, 0.05
"""Minimum seconds between two sessions' replays, and maximum part of the time that these take."""
AGAIN_AFTER = 6 * 3600.0
"""Seconds after which the advice for a user's sessions with a template is computed again. Our choice: a week's record
changes little within hours."""


SOON_AFTER = 1800.0
"""The same while there are too few bursts. Our choice: most sessions last longer."""


@dataclass(frozen=True)
class Evidence:
    """The record of a user's sessions with a template."""

    recordings: tuple[Recording, ...]
    held_seconds: float
    """How long the user held shares of the template in the last `ADVICE_PERIOD`."""


def evidence(
    connection: Connection, user: str, template: str, units: int, gpu_bytes: Mapping[tuple[str, str], int], now: float
) -> Evidence:
    """Return the record of the user's bursts with the template and this share.

    ``gpu_bytes``: the memory of the GPUs that still exist, by node and UUID.
    """
    since = now - ADVICE_PERIOD
    of_user = select(SUBJECT.c.id).where(SUBJECT.c.user == user, SUBJECT.c.template == template)
    own = select(SUBJECT.c.id, SUBJECT.c.node, SUBJECT.c.gpu, BURST).join_from(BURST, SUBJECT)
    rows = connection.execute(
        own.where(BURST.c.subject.in_(of_user), BURST.c.units == units, BURST.c.ended_at >= since)
        .order_by(BURST.c.ended_at.desc())
        .limit(MOST_OWN)
    ).all()
    recordings = []
    for subject in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in reversed(rows) if row[0] == subject]
        place = mine[0].node, mine[0].gpu
        if place in gpu_bytes:
            bursts = tuple(_burst_record(row._mapping).burst for row in mine)
            neighbours = _neighbours(connection, subject, place, bursts[0].began_at - NEAR, bursts[-1].ended_at + NEAR)
            recordings.append(Recording(gpu_bytes[place], RecordedSession(units, bursts), neighbours))
    reserved = connection.scalar(
        select(func.sum(USE.c.reserved)).where(USE.c.subject.in_(of_user), USE.c.start >= since)
    )
    return Evidence(tuple(recordings), (reserved or 0.0) * UNITS_PER_GPU / units)


def _neighbours(
    connection: Connection, subject: int, place: tuple[str, str], since: float, until: float
) -> tuple[RecordedSession, ...]:
    """Return the other sessions on a GPU in a time."""
    there = select(SUBJECT.c.id).where(SUBJECT.c.node == place[0], SUBJECT.c.gpu == place[1], SUBJECT.c.id != subject)
    rows = connection.execute(
        select(BURST)
        .where(BURST.c.subject.in_(there))
        .where(BURST.c.ended_at >= since, BURST.c.ended_at - BURST.c.seconds <= until)
        .order_by(BURST.c.ended_at.desc())
        # many of them are far from the session's own
        .limit(4 * MOST_OTHER)
    ).all()
    sessions: dict[int, list[BurstRecord]] = {}
    for row in reversed(rows):
        sessions.setdefault(row.subject, []).append(_burst_record(row._mapping))
    return tuple(
        RecordedSession(max(1, records[-1].units), tuple(record.burst for record in records))
        for records in sessions.values()
    )


def _burst_record(columns: Mapping[Any, Any]) -> BurstRecord:
    return BurstRecord(*(columns[BURST.c[field.name]] for field in fields(BurstRecord)))


def advice_of(connection: Connection, user: str | None) -> list[AdviceRecord]:
    """Return the stored advice, by user and template. ``user``: only this user's; None: all."""
    question: Select[Any] = select(ADVICE).order_by(ADVICE.c.user, ADVICE.c.template)
    if user is not None:
        question = question.where(ADVICE.c.user == user)
    return [AdviceRecord(**row._mapping) for row in connection.execute(question)]


@dataclass(frozen=True)
class AdviceTotals:
    """What could be won with the advised shares, for a template and a group."""

    template: str
    group: str
    users: int
    freed_gpu_seconds: float
    saved_seconds: float


def sums_of(records: Iterable[AdviceRecord], now: float) -> list[AdviceTotals]:
    """Return the sums of the advice for work of the last `ADVICE_PERIOD`, by template and group, largest first."""
    rows: dict[tuple[str, str], list[AdviceRecord]] = {}
    for record in records:
        if record.advised_units != record.units and record.until >= now - ADVICE_PERIOD:
            rows.setdefault((record.template, record.group), []).append(record)
    sums = [
        AdviceTotals(
            *key,
            len(of_key),
            sum(record.freed_gpu_seconds for record in of_key),
            sum(record.saved_seconds for record in of_key),
        )
        for key, of_key in rows.items()
    ]
    return sorted(sums, key=lambda entry: (-entry.freed_gpu_seconds, -entry.saved_seconds))


async def advice_for(context: ActionContext, target: Target) -> dict[str, Any] | None:
    """Return the advice for an open session: units, and a sentence. None: no advice that its user can follow now."""
    session, history = await current(target), context.journal
    if history is None or len(session.gpus) != 1:
        return None
    try:
        stored = await history.ask(lambda connection: advice_of(connection, session.user))
        choices = await other_shares(context, target)
    except (HistoryFailed, ActionRefused):
        return None
    for record in stored:
        held = record.template == session.template and record.units == session.share_units
        if held and record.advised_units in choices:
            return {"units": record.advised_units, "text": words.advice(record)}
    return None


class ShareAdvisor:
    """Computes advice for the open sessions, one after another."""

    def __init__(self, history: History, context: ActionContext) -> None:
        self._history = history
        self._context = context
        self._computed: dict[tuple[str, str], float] | None = None
        """When the advice was computed, by user and template, in seconds since the epoch; None: not yet read."""

    async def run(self) -> None:
        """Compute advice until cancelled."""
        pause = STEP_EVERY
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                await self.step()
            except (HistoryFailed, ActionRefused):
                pass  # the recorder and the culler log these
            except Exception:
                log.exception("Cannot compute the right size of a share")
            pause = max(STEP_EVERY, (time.monotonic() - began) / PART)

    async def step(self) -> None:
        """Compute the advice for the session that has waited longest, if it is due."""
        now = self._context.clock()
        if self._computed is None:
            stored = await self._history.ask(lambda connection: advice_of(connection, None))
            self._computed = {(record.user, record.template): record.computed_at for record in stored}
        computed, reports = self._computed, await self._context.reports()
        due = [
            (computed.get((session.user, session.template), 0.0), report.node, session)
            for report in reports
            for session in report.sessions
            if session.confirmed and session.layer is LayerName.NATIVE and len(session.gpus) == 1
        ]
        last, _, session = min(due, key=lambda entry: entry[:1], default=(now, "", None))
        if session is not None and not now - AGAIN_AFTER < last <= now:
            # a session for which this fails must not delay the others
            computed[session.user, session.template] = now - AGAIN_AFTER + SOON_AFTER
            if await self._compute(session, reports, now):
                computed[session.user, session.template] = now

    async def _compute(self, session: SessionReport, reports: Sequence[KnownReport], now: float) -> bool:
        """Return whether there were enough bursts."""
        gpus = {(report.node, gpu.uuid): gpu for report in reports for gpu in report.gpus}
        sizes = {place: gpu.memory_bytes for place, gpu in gpus.items()}
        user, template, units = session.user, session.template, session.share_units
        found = await self._history.ask(lambda connection: evidence(connection, user, template, units, sizes, now))
        gpu = next((gpu for (_, uuid), gpu in gpus.items() if uuid in session.gpus), None)
        bursts = [burst for recording in found.recordings for burst in recording.own.bursts]
        if gpu is None or not is_evidence(bursts):
            return False
        others = offered_shares(await templates_for(self._context, session, reports), gpu)
        result = await in_daemon_thread(lambda: advise(found.recordings, others, found.held_seconds))
        if result is not None:
            group = self._history.group_of(session) or ""
            record = AdviceRecord(**asdict(result), user=user, template=template, group=group, computed_at=now)
            await self._history.set_advice(record)
        return True


def offered_shares(templates: Iterable[Template], gpu: GpuReport) -> list[OtherShare]:
    """Return the shares of one GPU that the templates have, with their memory on a GPU."""
    shares = []
    for template in templates:
        if template.gpu is not None and template.gpu.share.count == 1:
            units, memory = template.gpu.share.units, template.gpu.memory
            guarantee, limit = (
                resolve_bytes(written, gpu.memory_bytes) for written in (memory.guarantee or f"{units}%", memory.limit)
            )
            shares.append(OtherShare(units, guarantee, limit))
    return shares
