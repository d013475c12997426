"""Cancel a spawn that waits, and put one at the end of the queue."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.controls import SpawnNote, taken_out
from gpushare_spawner.service.actions import restart
from gpushare_spawner.service.actions.context import ActionOutcome, RefusalCode
from gpushare_spawner.wording import actions as words
from tests.service.actions.conftest import ANN, ROOT, Acting
from tests.service.actions.test_other_actions import refusal_of
from tests.service.fake_hub import FakeHub

OPTIONS = {"profile": "quarter"}


@pytest.fixture
def waiting(hub_server: FakeHub) -> FakeHub:
    """Ann's server waits for a GPU."""
    hub_server.add("ann", "x", ready=False, pending="spawn", user_options=OPTIONS)
    return hub_server


async def test_a_spawn_is_cancelled_once(acting: Acting, waiting: FakeHub) -> None:
    assert await restart.cancel(acting.actions, "ann", "x", ANN) == ActionOutcome(True, words.CANCELLED)
    assert not waiting.users["ann"]["servers"]
    assert await restart.cancel(acting.actions, "ann", "x", ROOT) == ActionOutcome(False, words.NOT_STARTING)
    assert acting.history == [("cancel", "ann", "ann")]


async def test_the_spawner_is_told_who_else_cancelled_a_spawn_and_why(acting: Acting, waiting: FakeHub) -> None:
    assert (await restart.cancel(acting.actions, "ann", "x", ROOT, "An exam begins.")).changed
    methods = [method for method, _, _ in waiting.asked]
    assert methods == ["GET", "DELETE", "GET", "POST"]
    note = SpawnNote(text="root cancelled the spawn: An exam begins.", cancelled=True)
    assert taken_out(waiting.asked[-1][2]) == (OPTIONS, note)


async def test_a_spawn_is_cancelled_even_if_the_hub_takes_no_note(acting: Acting, waiting: FakeHub) -> None:
    waiting.faults = [None, None, None, 503]
    assert await restart.cancel(acting.actions, "ann", "x", ROOT) == ActionOutcome(True, words.CANCELLED)
    assert acting.history == [("cancel", "root", "ann")]


async def test_a_server_that_runs_is_no_spawn(acting: Acting, hub_server: FakeHub) -> None:
    hub_server.add("ann", "")
    for action in (restart.cancel, restart.requeue):
        refusal = await refusal_of(action(acting.actions, "ann", "", ROOT))
        assert (refusal.code, refusal.text) == (RefusalCode.BUSY, words.RUNS_ALREADY)
    assert not hub_server.deleted


async def test_a_spawn_is_queued_anew_with_its_options(acting: Acting, waiting: FakeHub) -> None:
    assert await restart.requeue(acting.actions, "ann", "x", ROOT) == ActionOutcome(True, words.REQUEUED)
    sent = waiting.users["ann"]["servers"]["x"]["user_options"]
    note = SpawnNote(text="root put the spawn at the end of the queue.")
    assert taken_out(sent) == (OPTIONS, note)
    assert [method for method, _, _ in waiting.asked] == ["GET", "DELETE", "GET", "POST"]
    assert acting.history == [("requeue", "root", "ann")]
    refusal = await refusal_of(restart.requeue(acting.actions, "ann", "none", ROOT))
    assert refusal.text == words.NOT_STARTING


async def test_a_hub_that_does_not_start_it_anew_is_said(acting: Acting, waiting: FakeHub) -> None:
    waiting.faults = [None, None, None, 503]
    refusal = await refusal_of(restart.requeue(acting.actions, "ann", "x", ROOT))
    assert refusal.text.startswith("The spawn was cancelled, and could not enter the queue again. The hub answered")
    assert acting.history == [("cancel", "root", "ann")]
