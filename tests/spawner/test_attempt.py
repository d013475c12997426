"""The state of one spawn, without a spawner: its phases, and what is left when it fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from traitlets import Integer
from traitlets.config import LoggingConfigurable

from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.attempt import SpawnAttempt, SpawnPhase, SpawnProgress
from gpushare_spawner.spawner.options import Choice, Overrides, Profile
from gpushare_spawner.spawner.queue.queue import Ticket
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest

PROFILE = Profile.of_template(
    Template.model_validate({"name": "t", "display_name": "T", "kubespawner_override": {"size": 7}})
)

QUARTER = Template.model_validate({"name": "q", "display_name": "Q", "gpu": {"fraction": 0.25}})


class Traits(LoggingConfigurable):
    size = Integer(1)
    log = logging.getLogger("test")


class Attempt(SpawnAttempt[Any]):
    def __init__(self) -> None:
        self.traits = Traits()
        super().__init__(Overrides(self.traits))
        self.given_back = 0

    def give_back(self) -> None:
        reservation, self.reservation = self.reservation, None
        self.given_back += reservation is not None


@pytest.fixture
def attempt() -> Attempt:
    return Attempt()


async def place(attempt: Attempt, failure: Exception | None = None) -> None:
    with attempt.placing():
        attempt.apply(Choice(PROFILE))
        attempt.reservation = object()
        if failure is not None:
            raise failure
        await asyncio.sleep(0)


async def test_a_placed_spawn_is_ready_and_has_told_all(attempt: Attempt) -> None:
    await place(attempt)
    assert attempt.phase is SpawnPhase.READY
    assert attempt.chosen
    assert (attempt.traits.size, attempt.template_name) == (7, "t")
    assert [event async for event in attempt.progress.events()] == []


async def test_a_spawn_that_fails_while_it_is_placed_leaves_nothing(attempt: Attempt) -> None:
    with pytest.raises(RuntimeError):
        await place(attempt, RuntimeError())
    assert attempt.phase is SpawnPhase.ENDED
    assert (attempt.given_back, attempt.reservation) == (1, None)
    assert (attempt.traits.size, attempt.template_name, attempt.choice) == (1, "", None)


async def test_a_wait_for_a_share_is_called_off_once(attempt: Attempt) -> None:
    async def wait() -> None:
        with attempt.placing():
            await asyncio.sleep(60)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    assert attempt.phase is SpawnPhase.PLACING
    assert attempt.call_off()
    await asyncio.wait({task})
    assert task.cancelled()
    assert attempt.phase is SpawnPhase.ENDED  # type: ignore[comparison-overlap]
    assert not attempt.call_off()


async def test_a_share_that_is_cancelled_while_it_is_waited_for_leaves_the_wait_to_its_task(attempt: Attempt) -> None:
    with attempt.placing():
        attempt.reservation = object()
        attempt.cancel()
        assert attempt.phase is SpawnPhase.PLACING
        assert attempt.given_back == 1


async def test_a_start_that_fails_keeps_its_traits_until_the_attempt_is_cancelled(attempt: Attempt) -> None:
    await place(attempt)

    def start() -> None:
        with attempt.starting():
            assert attempt.chosen
            raise RuntimeError

    with pytest.raises(RuntimeError):
        start()
    # what removes the server's pod needs its name, which may be one of them
    assert (attempt.phase, attempt.traits.size, attempt.given_back) == (SpawnPhase.ENDED, 7, 0)
    attempt.cancel()
    attempt.cancel()
    assert (attempt.traits.size, attempt.given_back) == (1, 1)


async def test_a_started_server_is_not_settled_any_more(attempt: Attempt) -> None:
    attempt.choose(Choice(PROFILE))
    with attempt.starting():
        assert attempt.phase is SpawnPhase.STARTING
    assert attempt.phase is SpawnPhase.STARTED  # type: ignore[comparison-overlap]
    assert not attempt.chosen


def test_the_state_of_a_server_is_its_template(attempt: Attempt) -> None:
    assert attempt.state() == {}
    attempt.apply(Choice(PROFILE))
    assert attempt.state() == {"template": "t"}
    later = Attempt()
    later.restore(attempt.state())
    assert (later.template_name, later.phase) == ("t", SpawnPhase.STARTED)


def test_a_profile_of_the_admins_own_is_not_remembered(attempt: Attempt) -> None:
    attempt.record_choice(Choice(Profile(slug="own", display_name="Own")))
    assert attempt.state() == {}
    assert not attempt.hides_gpus
    attempt.record_choice(Choice(PROFILE))
    assert attempt.hides_gpus


async def test_other_nodes_of_a_waiting_spawn_are_for_programs_and_only_the_last_event_names_them() -> None:
    progress = SpawnProgress()
    ticket = Ticket(SpawnRequest(Tenant("ann"), QUARTER), 0.0)
    following = asyncio.ensure_future(progress.follow(ticket, 99.0))
    for hint, nodes in (("Full.", ("a",)), ("Full.", ("a", "b")), ("Full still.", ("b",))):
        ticket.says(0, hint)
        ticket.nodes = nodes
        ticket.publish(0.0)
        await asyncio.sleep(0.01)
    following.cancel()
    progress.end()
    events = [event async for event in progress.events()]
    assert ["message" in event for event in events] == [True, False, True]
    assert [event.get("nodes") for event in events] == [None, None, ("b",)]
    assert {event["queue_position"] for event in events} == {1}
