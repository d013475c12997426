"""Who gets a message, how often, and that nothing of it stops the culler."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.controls import Message, MessageCause
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.service.culler.decisions import CullerSettings, SessionDecision, decide_sessions
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.notifiers import outbox as module
from gpushare_spawner.service.notifiers.config import Notification, NotSent, notifier_file
from gpushare_spawner.service.notifiers.outbox import Outbox, RateLimits
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.dashboards import NO_AGENT

CONFIG = """\
classes: [{path: "tests.service.notifiers.test_outbox:Keeper", options: {mark: "x"}}]
actions: [release, stop]
dashboard: https://hub.example.org/services/gpushare/
"""
SENT: list[Notification] = []
FAIL: list[Exception] = []


class Keeper:
    """An admin's own notifier."""

    def __init__(self, mark: str) -> None:
        assert mark == "x"

    async def send(self, message: Notification) -> None:
        if FAIL:
            raise FAIL.pop()
        SENT.append(message)


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    SENT.clear()
    FAIL.clear()
    monkeypatch.setattr(module, "MOST_PER_DAY", 3)
    monkeypatch.setattr(module, "MOST_PER_MINUTE", 5)


def decision(clock: Clock, user: str = "ada", closed_for: float = HOUR, **changes: Any) -> SessionDecision:
    """A session whose user has a notice of a stop in five minutes."""
    notice = Notice(
        tier=Tier.STOPPED, at=clock() + 5 * MINUTE, reason="It is idle.", cause=IdleCause.IDLE, after_seconds=8 * HOUR
    )
    values = {
        "id": user, "user": user, "template": "gone", "gpus": ("GPU-0",), "share_units": 25, "effective_units": 25,
        "guaranteed_units": 25, "tier_since": 1.0, "opened_at": 1.0, "notice": notice,
    }  # fmt: skip
    report = KnownReport(
        node="n", published_at=clock(), gpus=(), sessions=(SessionReport.model_validate(values | changes),)
    )
    (made,) = decide_sessions([NodeSnapshot(NO_AGENT, report)], None, {}, clock(), CullerSettings())
    return replace(made, server=HubServer(user, "", started=0.0, last_activity=clock() - closed_for))


@pytest.fixture
def outbox(tmp_path: Path, clock: Clock) -> Outbox:
    (tmp_path / "notifiers.yaml").write_text(CONFIG)
    made = Outbox(notifier_file(tmp_path / "notifiers.yaml"), clock)
    made.offer([])
    return made


@asynccontextmanager
async def sending(outbox: Outbox) -> AsyncIterator[Callable[[], Any]]:
    task = asyncio.create_task(outbox.run())

    async def settled() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)

    yield settled
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_notice_leads_to_one_message(outbox: Outbox, clock: Clock) -> None:
    one = decision(clock)
    async with sending(outbox) as settled:
        for _ in range(3):
            outbox.offer([one])
            await settled()
    (message,) = SENT
    assert (message.user, message.action, message.at) == ("ada", "stop", clock() + 5 * MINUTE)
    assert message.subject.startswith("Your notebook server will stop at ")
    said = f"{message.subject} {message.text}"
    assert len(re.findall(r"\b\d\d:\d\d\b", said)) == len(re.findall(r"\b\d{4}-\d\d-\d\d \d\d:\d\d UTC\b", said)) >= 1
    assert "5 min" not in said, "it is wrong when the message is read"
    assert "It is idle." in message.text
    assert "https://hub.example.org/services/gpushare/" in message.text
    assert "run a cell" in message.text


async def test_an_open_tab_gets_its_message_when_it_was_closed_for_long_enough(outbox: Outbox, clock: Clock) -> None:
    async with sending(outbox) as settled:
        outbox.offer([decision(clock, closed_for=5 * MINUTE)])
        outbox.offer([replace(decision(clock, "eve"), server=None)])
        await settled()
        assert not SENT
        outbox.offer([decision(clock, closed_for=16 * MINUTE)])
        await settled()
    assert len(SENT) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"notice": None},
        {"kernels_busy": 1},
        {"notice": Notice(tier=Tier.DOWNGRADED, at=2e9, reason="")},
        {"notice": Notice(tier=Tier.STOPPED, at=1.0, reason="")},
    ],
)
async def test_no_message_without_need(outbox: Outbox, clock: Clock, changes: dict[str, Any]) -> None:
    async with sending(outbox) as settled:
        outbox.offer([decision(clock, **changes)])
        await settled()
    assert not SENT


async def test_notice_of_processes_without_the_library_is_sent_once_with_its_own_text(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "notifiers.yaml").write_text(CONFIG.replace("actions: [release, stop]\n", ""))
    outbox = Outbox(notifier_file(tmp_path / "notifiers.yaml"), clock)
    notice = Message(text="Process 4711 is over.", by="culler", at=clock(), cause=MessageCause.BYPASS)
    one = decision(clock, closed_for=0, notice=None, kernels_busy=1, messages=(notice,))
    async with sending(outbox) as settled:
        outbox.offer([])
        for _ in range(3):
            clock.forward(MINUTE)
            outbox.offer([one])
            await settled()
        later = notice.model_copy(update={"at": clock(), "text": "Process 42 is over."})
        outbox.offer([decision(clock, notice=None, messages=(later,))])
        await settled()
    assert [(message.action, message.text) for message in SENT] == [
        ("bypass", "Process 4711 is over."), ("bypass", "Process 42 is over."),
    ]  # fmt: skip
    assert SENT[0].subject == "Your GPU session holds more GPU memory than it may"


async def test_a_dry_run_sends_nothing(outbox: Outbox, clock: Clock) -> None:
    async with sending(outbox) as settled:
        outbox.offer([replace(decision(clock), dry_run=True)])
        await settled()
    assert not SENT


async def test_what_cannot_be_averted_is_not_said_to_be(outbox: Outbox, clock: Clock) -> None:
    notice = Notice(tier=Tier.STOPPED, at=clock() + HOUR, reason="Too old.", cause=IdleCause.MAX_AGE)
    async with sending(outbox) as settled:
        outbox.offer([decision(clock, notice=notice)])
        await settled()
    assert "run a cell" not in SENT[0].text


async def test_a_service_that_starts_repeats_no_message(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "notifiers.yaml").write_text(CONFIG)
    outbox = Outbox(notifier_file(tmp_path / "notifiers.yaml"), clock)
    async with sending(outbox) as settled:
        outbox.offer([decision(clock)])
        outbox.offer([decision(clock), decision(clock, "eve")])
        await settled()
    assert [message.user for message in SENT] == ["eve"]


async def test_a_notice_for_a_later_time_is_a_new_one(outbox: Outbox, clock: Clock) -> None:
    async with sending(outbox) as settled:
        outbox.offer([decision(clock)])
        await settled()
        clock.forward(2 * HOUR)
        outbox.offer([decision(clock)])
        await settled()
    assert len(SENT) == 2


async def test_a_user_gets_only_so_many_messages_a_day(outbox: Outbox, clock: Clock) -> None:
    async with sending(outbox) as settled:
        for _ in range(5):
            clock.forward(10 * MINUTE)
            outbox.offer([decision(clock)])
            await settled()
        assert len(SENT) == 3
        clock.forward(24 * HOUR)
        outbox.offer([decision(clock)])
        await settled()
    assert len(SENT) == 4


async def test_the_rest_of_many_messages_comes_in_the_next_minute(outbox: Outbox, clock: Clock) -> None:
    many = [decision(clock, f"user-{number}") for number in range(8)]
    async with sending(outbox) as settled:
        outbox.offer(many)
        await settled()
        assert len(SENT) == 5
        clock.forward(61.0)
        outbox.offer(many)
        await settled()
    assert len(SENT) == 8


async def test_a_failure_is_logged_and_tried_again(
    outbox: Outbox, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    FAIL.extend([NotSent("no route"), RuntimeError("broken")])
    one = decision(clock)
    async with sending(outbox) as settled:
        for expected in (0, 0, 1, 1):
            outbox.offer([one])
            await settled()
            outbox.offer([one])
            await settled()
            assert len(SENT) == expected
            clock.forward(2 * MINUTE)
    assert "no route" in caplog.text
    assert "broken" in caplog.text


async def test_three_failures_end_a_message(outbox: Outbox, clock: Clock) -> None:
    FAIL.extend([NotSent("down")] * 5)
    one = decision(clock, notice=Notice(tier=Tier.STOPPED, at=clock() + 9 * HOUR, reason=""))
    async with sending(outbox) as settled:
        for _ in range(6):
            outbox.offer([one])
            await settled()
            clock.forward(10 * MINUTE)
    assert len(FAIL) == 2


async def test_a_notifier_that_hangs_holds_up_nobody(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(self: Keeper, message: Notification) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(module, "SEND_SECONDS", 0.01)
    monkeypatch.setattr(Keeper, "send", hangs)
    (tmp_path / "n.yaml").write_text(CONFIG)
    outbox = Outbox(notifier_file(tmp_path / "n.yaml"), clock)
    outbox.offer([])
    async with sending(outbox) as settled:
        outbox.offer([decision(clock), decision(clock, "eve")])
        await asyncio.sleep(0.1)
        await settled()
        assert not outbox._queue.qsize()


async def test_a_full_queue_and_a_wrong_class_stop_nothing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    (tmp_path / "n.yaml").write_text(CONFIG.replace("]\nactions", ', {path: "nowhere:None"}]\nactions', 1))
    outbox = Outbox(notifier_file(tmp_path / "n.yaml"), clock)
    outbox.offer([])
    many = [decision(clock, f"user-{number}") for number in range(4)]
    outbox.offer(many)
    assert outbox._queue.qsize() == 2
    async with sending(outbox) as settled:
        await settled()
        outbox.offer(many)
        await settled()
    assert len(SENT) == 4
    assert "The notifier nowhere:None cannot be made" in caplog.text


async def test_a_file_with_an_error_is_a_problem_and_sends_nothing(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "n.yaml").write_text("emails: {}")
    outbox = Outbox(notifier_file(tmp_path / "n.yaml"), clock)
    outbox.offer([])
    outbox.offer([decision(clock)])
    assert outbox.problems == ["Notifiers n.yaml:1: emails: unknown field; did you mean 'email'?"]
    assert not outbox._queue.qsize()


def test_a_clock_that_is_set_back_forgets_messages_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PER_DAY", 1)
    monkeypatch.setattr(module, "MOST_PER_MINUTE", 1)
    rates = RateLimits()
    rates.sent("ada", 1000.0)
    assert not rates.user_may("ada", 1001.0)
    assert not rates.all_may(1001.0)
    assert rates.user_may("ada", 10.0)
    assert rates.all_may(10.0)
