"""Sessions on drained GPUs: told once, stopped in time, and not by a dry run."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.controls import Cordon, Exemption, Message, MessageCause, with_message
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.reports import MachineAgent
from gpushare_spawner.wording.amounts import utc
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub


class Draining:
    """A culler, and a machine with ann on GPU 0 and bob on GPU 1, of which GPU 0 is drained for an hour."""

    def __init__(
        self, agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
    ) -> None:
        self.agent, self.hub_server, self.clock = agent, hub_server, clock
        self.recorded: list[Action] = []
        for user, gpu in (("ann", "GPU-0"), ("bob", "GPU-1")):
            agent.add(user, gpus=(gpu,), gpu_busy=True)
            hub_server.add(user, last_activity=clock())
        now = clock()
        agent.cordons = (
            Cordon(gpu="GPU-0", by="boss", reason="Fan.", since=now, drain=True, stop_at=now + HOUR),
            Cordon(gpu="GPU-1", by="boss", since=now),
        )
        self._agents = [MachineAgent(agent.path)]
        self._hub, self._templates = hub, templates
        self.culler = self.another()

    def another(self, dry_run: bool = False) -> Culler:
        actions = ActionContext(
            self._agents, self._hub, lambda: self._templates, record=self.recorded.append, clock=self.clock
        )
        settings = CullerSettings(cull_every=1e-9, dry_run=dry_run)
        return Culler(actions, settings)

    def write(self, user: str, text: str) -> None:
        """A message of the admin who drains, sent now."""
        standing = with_message(self.agent.sessions[user].messages, Message(text=text, by="boss", at=self.clock()))
        self.agent.change(user, message=standing[-1], messages=standing)

    def told(self) -> int:
        """How often ann was told something by the drain."""
        return sum((one.action, one.user) == ("message", "ann") for one in self.recorded)

    def message(self, user: str, cause: MessageCause = MessageCause.DRAIN) -> str | None:
        message = self.agent.sessions[user].message_of(cause)
        return message.text if message is not None else None

    def stop_said(self, seconds: float) -> str:
        """How a message names the stop that comes so many seconds from now on."""
        return f"Your server will be stopped at {utc(self.clock() + seconds)}."


@pytest.fixture
def draining(agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock) -> Draining:
    return Draining(agent, hub, hub_server, templates, clock)


async def test_users_on_a_drained_gpu_are_told_once_and_those_on_a_cordoned_one_are_not(draining: Draining) -> None:
    again = await draining.culler.round()
    assert draining.message("ann") == (
        f"GPU 0 of node fake is being taken out of service. Fan. {draining.stop_said(HOUR)} Save your work, and "
        "restart it before then. It will run elsewhere."
    )
    assert draining.message("bob") is None
    assert again is not None
    assert again <= draining.clock() + HOUR
    draining.clock.forward(MINUTE)
    await draining.culler.round()
    await draining.another().round()  # after a restart of the service
    assert [(action.action, action.actor, action.user) for action in draining.recorded] == [("message", "boss", "ann")]
    assert not draining.hub_server.deleted


async def test_a_session_that_comes_late_is_told_too(draining: Draining) -> None:
    draining.agent.add("zoe", gpus=("GPU-0",))
    await draining.culler.round()
    assert draining.message("zoe") == draining.message("ann")


async def test_a_busy_server_that_stays_is_stopped_in_time_and_once(draining: Draining) -> None:
    await draining.culler.round()
    draining.clock.forward(HOUR - 1)
    await draining.culler.round()
    assert not draining.hub_server.deleted
    draining.clock.forward(1)
    await draining.culler.round()
    await draining.culler.round()
    assert draining.hub_server.deleted == ["/users/ann/server"]
    assert [action.action for action in draining.recorded] == ["message", "stopped"]
    why = "boss stopped the server: GPU 0 of node fake is being taken out of service. Fan."
    assert draining.recorded[-1].reason == why
    assert draining.message("ann", MessageCause.ACTION) == why
    assert await draining.hub_server.noted() == {"/users/ann/server": f"{utc(draining.clock())}: {why}"}


async def test_a_session_that_is_told_late_has_its_notice_period(draining: Draining) -> None:
    await draining.culler.round()
    draining.clock.forward(2 * HOUR)
    draining.agent.add("zoe", gpus=("GPU-0",), gpu_busy=True)
    draining.hub_server.add("zoe", last_activity=draining.clock())
    await draining.culler.round()
    assert draining.stop_said(5 * MINUTE) in (draining.message("zoe") or "")
    draining.clock.forward(5 * MINUTE - 1)
    culler = draining.another()
    again = await culler.round()
    assert again is not None
    assert again <= draining.clock() + 1
    assert draining.hub_server.deleted == ["/users/ann/server"]
    draining.clock.forward(1)
    await culler.round()
    assert draining.hub_server.deleted[-1] == "/users/zoe/server"


async def test_an_admins_message_and_that_of_the_drain_stand_side_by_side(draining: Draining) -> None:
    draining.clock.forward(1)
    draining.write("ann", "The fan is replaced at 18:00.")
    await draining.culler.round()
    assert "is being taken out of service. Fan." in (draining.message("ann") or "")
    assert draining.message("ann", MessageCause.ADMIN) == "The fan is replaced at 18:00."
    draining.clock.forward(MINUTE)
    draining.write("ann", "It will take an hour.")
    await draining.culler.round()
    assert "is being taken out of service. Fan." in (draining.message("ann") or "")
    assert draining.told() == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_message_of_a_drain_ends_with_the_drain_and_no_other_does(
    draining: Draining, restarted: bool
) -> None:
    draining.write("ann", "The fan is replaced at 18:00.")
    await draining.culler.round()
    assert draining.message("ann")
    draining.agent.cordons = ()
    draining.clock.forward(MINUTE)
    await (draining.another() if restarted else draining.culler).round()
    assert draining.message("ann") is None
    assert draining.message("ann", MessageCause.ADMIN) == "The fan is replaced at 18:00."
    draining.clock.forward(2 * HOUR)
    await draining.culler.round()
    assert not draining.hub_server.deleted


async def test_a_drain_without_a_stop_says_no_instant_and_ends_too(draining: Draining) -> None:
    draining.agent.cordons = (Cordon(by="boss", reason="Update", since=draining.clock(), drain=True),)
    await draining.culler.round()
    assert draining.message("bob") == (
        "Node fake is being taken out of service. Update. Please save your work and restart your server. It will "
        "run elsewhere."
    )
    draining.agent.cordons = (Cordon(by="boss", since=draining.clock()),)  # the drain became a cordon
    await draining.culler.round()
    assert [draining.message(user) for user in ("ann", "bob")] == [None, None]


async def test_the_next_session_of_a_user_on_the_drained_gpu_is_told_too(draining: Draining) -> None:
    await draining.culler.round()
    draining.clock.forward(HOUR)
    draining.agent.add("ann", gpus=("GPU-0",), gpu_busy=True)
    await draining.culler.round()
    assert draining.stop_said(5 * MINUTE) in (draining.message("ann") or "")
    assert not draining.hub_server.deleted


async def test_a_drain_that_is_changed_is_told_anew_also_after_another_message(draining: Draining) -> None:
    await draining.culler.round()
    draining.clock.forward(2 * MINUTE)
    (drain, other), now = draining.agent.cordons, draining.clock()
    draining.agent.cordons = (drain.model_copy(update={"since": now, "stop_at": now + 2 * HOUR}), other)
    draining.write("ann", "It takes longer.")
    await draining.culler.round()
    assert draining.stop_said(2 * HOUR) in (draining.message("ann") or "")
    assert draining.message("ann", MessageCause.ADMIN) == "It takes longer."
    assert draining.told() == 2


async def test_a_clock_that_is_set_back_lets_nobody_be_told_without_end(draining: Draining) -> None:
    draining.clock.forward(-2 * HOUR)
    for _ in range(5):
        await draining.culler.round()
        draining.clock.forward(2 * MINUTE)
    assert draining.told() == 1
    draining.clock.forward(3 * HOUR)
    await draining.culler.round()
    assert draining.hub_server.deleted == ["/users/ann/server"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_clock_that_is_set_forward_takes_nobody_the_notice_period(draining: Draining, restarted: bool) -> None:
    await draining.culler.round()
    draining.clock.forward(MINUTE)
    draining.clock.forward(24 * HOUR)
    # as an agent does it: tests/agent/test_clock_steps.py
    (message,) = draining.agent.sessions["ann"].messages
    moved = message.model_copy(update={"at": message.at + 24 * HOUR})
    draining.agent.change("ann", message=moved, messages=(moved,))
    if restarted:
        draining.culler = draining.another()
    else:
        draining.culler.clock_was_set(24 * HOUR)
    for _ in range(4):
        await draining.culler.round()
        assert (draining.told(), draining.hub_server.deleted) == (1, [])
        draining.clock.forward(MINUTE)
    await draining.culler.round()
    assert draining.hub_server.deleted == ["/users/ann/server"]


async def test_a_late_notice_from_before_the_clock_was_set_back_holds_the_stop_no_longer_than_its_period(
    draining: Draining,
) -> None:
    draining.clock.forward(3 * HOUR)
    await draining.culler.round()
    draining.clock.forward(-HOUR)
    await draining.culler.round()
    assert (draining.told(), draining.hub_server.deleted) == (1, [])
    draining.clock.forward(5 * MINUTE)
    await draining.culler.round()
    assert draining.hub_server.deleted == ["/users/ann/server"]


async def test_a_session_that_is_exempt_is_told_and_stays(draining: Draining) -> None:
    draining.agent.change("ann", exemption=Exemption(by="boss"))
    await draining.culler.round()
    draining.clock.forward(2 * HOUR)
    await draining.culler.round()
    assert draining.message("ann")
    assert not draining.hub_server.deleted


async def test_a_dry_run_tells_nobody_and_stops_nothing(draining: Draining) -> None:
    await draining.another(dry_run=True).round()
    draining.clock.forward(2 * HOUR)
    await draining.another(dry_run=True).round()
    assert draining.message("ann") is None
    assert not draining.hub_server.deleted
