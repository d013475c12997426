from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from tornado.testing import bind_unused_port

from gpushare_spawner.idle.keep import KeepRule
from gpushare_spawner.model.control import (
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    NoticeRequest,
    ResizeRequest,
    ServiceRequest,
    TierRequest,
)
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.budgets import Budgets
from gpushare_spawner.service.command import service_application, service_server
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import HOUR, Action, GpuTimeAmounts, HistoryStore, Subject
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import Agent, KnownReport, RecentReports
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web.app import Page
from tests.present import present
from tests.service.api.clients import PREFIX, Client, SignedIn
from tests.service.conftest import deciding, hub, hub_server, with_keeps  # noqa: F401
from tests.service.dashboards import NO_AGENT, NOW, TEMPLATES, afternoon
from tests.service.fake_hub import FakeHub

WAITING = (
    HubServer("ann", "second", ready=False, pending="spawn", started=NOW - 60, profile="half"),
    HubServer("fay", "", ready=False, pending="spawn", started=NOW - 30, profile="half"),
)


class StandInAgent:
    """Says what the test gives it."""

    def __init__(self, report: KnownReport) -> None:
        self.now = report

    def report_age(self) -> float:
        return 0.0

    async def report(self) -> KnownReport:
        return self.now

    async def send(self, request: ServiceRequest, /) -> None:
        match request:
            case TierRequest():
                self._change(request.id, tier=request.tier, effective_units=request.effective_units)
            case ResizeRequest():
                self._change(request.id, share_units=request.share_units, effective_units=request.share_units)
            case NoticeRequest():
                self._change(request.id, notice=request.notice)
            case ControlsRequest():
                self._change(request.id, keep=request.keep, keeps=request.keeps, exemption=request.exemption)
            case CordonRequest():
                others = [one for one in self.now.cordons if one.gpu != request.gpu]
                self.now = self.now.with_cordons([*others, *([request.cordon] if request.cordon is not None else [])])
            case MessageRequest():
                session = present(self.now.session(request.id))
                self._change(request.id, messages=request.messages(session.messages))

    async def carried_out(self, request: TierRequest) -> bool:
        return True

    def _change(self, session: str, **changes: Any) -> None:
        self.now = self.now.model_copy(
            update={
                "sessions": tuple(
                    one.model_copy(update=changes) if one.id == session else one for one in self.now.sessions
                )
            }
        )


@dataclass
class Machine:
    """What the service sees: a machine on an afternoon, and two spawns that wait. ``recorded``: what went into the
    history."""

    agent: StandInAgent = field(default_factory=lambda: StandInAgent(afternoon()))
    pending: tuple[HubServer, ...] | None = WAITING
    quotas: Quotas | None = field(
        default_factory=lambda: Quotas.model_validate({"groups": {"optics": {"guarantee": 2}}, "users": {"bob": {}}})
    )
    now: float = NOW
    fails: bool = False
    recorded: list[Action] = field(default_factory=list)
    budgets: Budgets = field(init=False)

    def sources(self, hub: Hub = NO_AGENT) -> DashboardSources:  # noqa: F811
        async def pending() -> tuple[HubServer, ...] | None:
            if self.fails:
                raise RuntimeError("the test says so")
            return self.pending

        agents = [cast(Agent, self.agent)]
        rule = KeepRule(longest=8 * 3600, per_day=3, at_once=2)
        context = ActionContext(
            agents,
            hub,
            lambda: with_keeps(TEMPLATES, rule),
            self.recorded.append,
            lambda: self.now,
            lambda: self.quotas,
            pending,
        )
        reports = RecentReports(agents, max_age=0)
        return DashboardSources(context, reports, deciding(), lambda: ("The service lacks the scope x: y.",))


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
async def history(tmp_path: Path) -> History:
    async def nothing() -> list[Any]:
        return []

    kept = History(HistoryStore(f"sqlite:///{tmp_path}/h.sqlite"), HistorySources(nothing, list, nothing, dict))
    await kept.store()
    hour = int(NOW // HOUR) * HOUR
    use = {
        (hour, Subject(user, "", "quarter", "ml", "n1", "GPU-0", "A100")): GpuTimeAmounts(reserved=HOUR)
        for user in ("ann", "bob")
    }
    actions = [Action(NOW - 5, "released", "culler", user, reason="GPU idle for 45 min") for user in ("ann", "bob")]
    kept._store.add(use, [], [], actions)
    return kept


@pytest.fixture
async def api(
    machine: Machine,
    history: History,
    hub: Hub,  # noqa: F811
    hub_server: FakeHub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Client]:
    """A client of a service that shows the machine."""
    for session in machine.agent.now.sessions:
        hub_server.add(session.user, session.server, user_options={"profile": session.template})
    for waits in machine.pending or ():
        options = {"profile": waits.profile}
        hub_server.add(waits.user, waits.name, ready=False, pending="spawn", user_options=options)
    login = SignedIn()
    monkeypatch.setattr(Page, "_hub_auth", login)
    socket, port = bind_unused_port()
    sources = machine.sources(hub)
    budgets = machine.budgets = Budgets(sources.context, history)
    await budgets.refresh()
    sources = replace(sources, budgets=budgets.states)
    server = service_server(service_application(sources, PREFIX, history=history, max_age=0, budgets=budgets))
    server.add_socket(socket)
    yield Client(port, login)
    server.stop()
    await server.close_all_connections()
