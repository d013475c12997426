"""Each kind of notice ends with its cause, in each way, whatever restarts meanwhile; and it does not come back.

The culler, the agent's tiers and controls, and what both write to a pod's annotations are the product's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpushare_spawner.model.control import NoticeRequest
from gpushare_spawner.model.controls import Cordon, MessageCause
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions import keeps
from gpushare_spawner.service.actions.context import ActionContext, Actor
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from tests.service.agent_parts import AgentParts, PodAgent
from tests.service.conftest import HOUR, MINUTE, Clock, direct_hub
from tests.service.fake_hub import FakeHub

hub = direct_hub

ROOT, ANN = Actor("root", is_admin=True), Actor("ann")


class World:
    """A session, its agent, the service and the hub; what its user is told."""

    def __init__(self, agent: AgentParts, hub: Hub, templates: dict[str, Template], clock: Clock) -> None:
        self.agent, self.clock, self.templates = agent, clock, templates
        self.max_age = 0.0
        self._hub = hub
        self.shown: list[tuple[str, ...]] = []
        self.restart_service()

    def restart_service(self) -> None:
        self.actions = ActionContext([self.agent], self._hub, lambda: self.templates, clock=self.clock)
        settings = CullerSettings(cull_every=1e-9, max_age=self.max_age)
        self.culler = Culler(self.actions, settings)

    async def rounds(self, count: int = 1, seconds: float = 10.0) -> None:
        for _ in range(count):
            await self.culler.round()
            self.agent.look()
            self.shown.append(self.told())
            self.clock.forward(seconds)

    def told(self) -> tuple[str, ...]:
        """What the session's processes are told now: the kinds of notices and messages."""
        record = self.agent.session.record
        notice = [] if record.notice is None else [f"{record.notice.cause} {record.notice.tier}"]
        return (*notice, *(str(message.cause) for message in record.messages))

    async def seen(self) -> Any:
        await self.agent.report()
        session = (await self.agent.report()).sessions[0]
        return type("Seen", (), {"agent": self.agent, "node": "fake", "session": session})()

    def idle(self, **update: Any) -> None:
        one = self.templates["quarter"]
        self.templates["quarter"] = one.model_copy(update={"idle": one.idle.model_copy(update=update)})


@pytest.fixture(params=[AgentParts, PodAgent], ids=["one machine", "pod"])
def world(
    request: pytest.FixtureRequest, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
) -> World:
    hub_server.add("ann", last_activity=clock())
    return World(request.param(clock), hub, templates, clock)


async def told_of_downgrade(world: World) -> str:
    world.clock.forward(11 * MINUTE)
    return "idle downgraded"


async def told_of_release(world: World) -> str:
    world.idle(downgrade_after=None, downgrade_to=None)
    world.clock.forward(41 * MINUTE)
    return "idle released"


async def told_of_stop(world: World) -> str:
    world.idle(downgrade_after=None, downgrade_to=None, release_after=None)
    world.clock.forward(8 * HOUR - 4 * MINUTE)
    return "idle stopped"


async def told_of_age(world: World) -> str:
    world.idle(downgrade_after=None, downgrade_to=None, release_after=None, stop_after=None)
    world.max_age = HOUR
    world.restart_service()
    world.clock.forward(56 * MINUTE)
    return "max-age stopped"


async def told_of_drain(world: World) -> str:
    now = world.clock()
    world.agent.cordons = (Cordon(by="root", since=now, drain=True, stop_at=now + 2 * HOUR),)
    return "drain"


async def told_by_admin(world: World) -> str:
    await keeps.message(world.actions, await world.seen(), ROOT, "Hello.")
    return "admin"


async def told_of_action(world: World) -> str:
    await keeps.message(world.actions, await world.seen(), ROOT, "Released.", MessageCause.ACTION)
    return "action"


async def keep(world: World) -> None:
    await keeps.keep(world.actions, await world.seen(), ANN, seconds=HOUR)


async def work(world: World) -> None:
    world.agent.work_begins()
    world.clock.forward(20)
    world.agent.work_ends(20.0)


async def long_work(world: World) -> None:
    """It still runs when the service looks."""
    world.agent.work_begins()
    world.agent.gpu_seconds += 20.0
    world.clock.forward(20)


async def change_policy(world: World) -> None:
    world.idle(downgrade_after=None, downgrade_to=None, release_after=None, stop_after=None)
    world.max_age = 0.0
    world.restart_service()


async def exempt(world: World) -> None:
    await keeps.exempt(world.actions, await world.seen(), ROOT)


async def end_drain(world: World) -> None:
    world.agent.cordons = ()


async def cordon_only(world: World) -> None:
    world.agent.cordons = (Cordon(by="root", since=world.clock()),)


async def withdraw(world: World) -> None:
    await keeps.withdraw_messages(world.actions, await world.seen(), ROOT, MessageCause.ADMIN, MessageCause.ACTION)


Step = Callable[[World], Awaitable[Any]]
IDLE = (told_of_downgrade, told_of_release, told_of_stop)
ENDS: list[tuple[Step, Step]] = [
    *((kind, end) for kind in IDLE for end in (keep, work, long_work, change_policy, exempt)),
    (told_of_age, change_policy),
    (told_of_age, exempt),
    (told_of_drain, end_drain),
    (told_of_drain, cordon_only),
    (told_by_admin, withdraw),
    (told_of_action, withdraw),
]
STAYS: list[tuple[Step, Step]] = [
    (told_of_age, keep),
    (told_of_age, work),
    (told_of_drain, keep),
    (told_of_drain, work),
    (told_of_drain, withdraw),
    (told_of_drain, change_policy),
    (told_by_admin, keep),
    (told_by_admin, work),
    (told_by_admin, end_drain),
]
RESTARTS = ["nothing", "agent", "service", "both"]


def named(pairs: list[tuple[Step, Step]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("kind", "end"), pairs, ids=[f"{kind.__name__}-{end.__name__}" for kind, end in pairs]
    )


def restart(world: World, what: str) -> None:
    if what in ("agent", "both"):
        world.agent.restart()
    if what in ("service", "both"):
        world.restart_service()


@pytest.mark.parametrize("restarted", RESTARTS)
@named(ENDS)
async def test_a_notice_ends_with_its_cause_and_does_not_come_back(
    world: World, kind: Step, end: Step, restarted: str
) -> None:
    expected = await kind(world)
    await world.rounds(2)
    assert world.told() == (expected,)
    restart(world, restarted)
    await world.rounds()
    assert world.told() == (expected,)
    await end(world)
    restart(world, restarted)
    world.shown.clear()
    await world.rounds(12)
    assert set(world.shown) == {()}, "from the first round on"
    assert (await world.agent.report()).sessions[0].notice is None
    assert not (await world.agent.report()).sessions[0].messages
    if isinstance(world.agent, PodAgent):
        before = len(world.agent.patches)
        await world.rounds(3)
        assert len(world.agent.patches) == before, "nothing is written again and again"


@pytest.mark.parametrize("restarted", RESTARTS)
@named(STAYS)
async def test_a_notice_does_not_end_with_what_does_not_concern_it(
    world: World, kind: Step, end: Step, restarted: str
) -> None:
    expected = await kind(world)
    await world.rounds(2)
    await end(world)
    restart(world, restarted)
    await world.rounds(3)
    assert world.told() == (expected,)


@pytest.mark.parametrize("restarted", RESTARTS)
@pytest.mark.parametrize("deeper", [False, True])
async def test_a_notice_of_a_spawn_in_quota_ends_with_the_claim_or_the_action(
    world: World, restarted: str, deeper: bool
) -> None:
    """Work does not withdraw it; what the service decides of it is told by hand here."""
    at = world.clock() + 60
    notice = Notice(tier=Tier.RELEASED, at=at, reason="", cause=IdleCause.RECLAIM)
    await world.seen()
    await world.agent.send(NoticeRequest.of("ann", notice))
    await work(world)
    restart(world, restarted)
    assert world.told() == ("reclaim released",)
    if deeper:
        one = world.agent.session.record
        world.agent.tiers.change_tier(world.agent.session, Tier.RELEASED, 0, "reclaimed", at + 600)
        world.agent.look()
        assert one is world.agent.session.record
    else:
        await world.rounds()  # no spawn waits
    restart(world, restarted)
    world.shown.clear()
    await world.rounds(3)
    assert set(world.shown) == {()}
