"""5,000 sessions on 500 GPUs: what a page of the dashboard costs once a snapshot has been taken."""

from __future__ import annotations

import time

from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.api import reading
from gpushare_spawner.service.api.reading import SessionsQuery
from gpushare_spawner.service.api.router import Call, Nothing, Services
from gpushare_spawner.service.api.snapshots import Events, ServiceSnapshots
from gpushare_spawner.service.hub.caller import Caller
from tests.service.api.conftest import Machine, StandInAgent
from tests.service.dashboards import NO_AGENT, NOW, TEMPLATES, afternoon, session

MOST_SECONDS = 0.25
"""Of CPU, for a page of 100 and the totals together; 0.05 s each on a machine that does nothing else."""


async def test_a_page_of_sessions_and_the_totals_are_cheap() -> None:
    report = afternoon()
    gpu = report.gpus[0]
    gpus = tuple(gpu.model_copy(update={"index": one, "uuid": f"GPU-{one}"}) for one in range(500))
    sessions = tuple(
        session(f"user-{one}", gpus=(f"GPU-{one % 500}",), share_units=10, effective_units=10, memory_bytes=one)
        for one in range(5000)
    )
    machine = Machine(StandInAgent(report.model_copy(update={"gpus": gpus, "sessions": sessions})), quotas=None)
    snapshots = ServiceSnapshots(machine.sources(), max_age=3600)
    actions = ActionContext((), NO_AGENT, lambda: TEMPLATES, clock=lambda: NOW)
    services = Services("/", snapshots, Events(snapshots), actions)
    caller = Caller("boss", is_admin=True)
    query = SessionsQuery(sort="-memory", limit=100)
    listing = Call(services, caller, {}, query, Nothing())
    totals = Call(services, caller, {}, Nothing(), Nothing())
    await reading.sessions(listing)
    await reading.summary(totals)
    began = time.process_time()
    page = (await reading.sessions(listing)).model_dump_json()
    after_page = time.process_time()
    found = await reading.summary(totals)
    ended = time.process_time()
    print(f"page of 100: {1000 * (after_page - began):.1f} ms, summary: {1000 * (ended - after_page):.1f} ms")
    assert '"user":"user-4999"' in page
    assert sum(found.sessions.values()) == 5000
    assert ended - began < MOST_SECONDS
