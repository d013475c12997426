"""How long spawns waited for a GPU."""

from __future__ import annotations

from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.service.history.recorder import SpawnWatch
from gpushare_spawner.service.history.store import Wait, WaitOutcome
from gpushare_spawner.service.hub.client import HubServer

NOW = 1_000_000.0


def session(user: str, opened_at: float = NOW) -> SessionReport:
    return SessionReport(
        id=user, user=user, template="quarter", gpus=("GPU-0",), share_units=25, opened_at=opened_at,
        tier_since=opened_at, effective_units=25, guaranteed_units=25,
    )  # fmt: skip


def report(*sessions: SessionReport, node: str = "n") -> Report:
    return Report(node=node, published_at=NOW, gpus=(), sessions=sessions)


def pending(user: str, started: float | None) -> HubServer:
    return HubServer(user, "", ready=False, pending="spawn", started=started, profile="half")


def watch() -> SpawnWatch:
    watch = SpawnWatch(lambda user: "ml" if user == "ann" else "")
    assert watch.observe_report(report(session("old")), {}) == []
    return watch


def test_a_server_waited_from_its_start_to_its_share() -> None:
    found = watch().observe_report(report(session("old"), session("ann", NOW)), {("ann", ""): NOW - 30})
    assert found == [Wait(NOW - 30, 30.0, WaitOutcome.STARTED, "ann", "", "quarter", "ml")]


def test_a_start_that_the_hub_does_not_date_waited_for_nothing() -> None:
    (wait,) = watch().observe_report(report(session("old"), session("bob")), {})
    assert (wait.seconds, wait.group) == (0.0, "")


def test_each_wait_is_counted_once() -> None:
    one = watch()
    again = report(session("old"), session("ann"))
    assert len(one.observe_report(again, {})) == 1
    assert one.observe_report(again, {}) == []
    assert len(one.observe_report(report(session("old"), session("ann", NOW + 60)), {})) == 1


def test_sessions_from_before_the_service_are_left_out_on_each_node() -> None:
    assert watch().observe_report(report(session("zoe"), node="other"), {}) == []


def test_a_spawn_that_was_seen_waiting_waited_since_then() -> None:
    one = watch()
    one.observe_queue([pending("ann", NOW - 100)], NOW)
    (wait,) = one.observe_report(report(session("old"), session("ann", NOW + 20)), {("ann", ""): NOW + 19})
    assert wait.seconds == 120


def test_a_spawn_that_gave_up() -> None:
    one = watch()
    assert one.observe_queue([pending("ann", None)], NOW) == []
    assert one.observe_queue([], NOW + 40) == [Wait(NOW, 40.0, WaitOutcome.GAVE_UP, "ann", "", "half", "ml")]
    assert one.observe_queue([], NOW + 50) == []


def test_a_spawn_that_got_its_share_did_not_give_up() -> None:
    one = watch()
    one.observe_queue([pending("ann", NOW)], NOW)
    one.observe_report(report(session("old"), session("ann", NOW + 5)), {})
    # still pending: its server is starting
    assert one.observe_queue([pending("ann", NOW)], NOW + 6) == []
    assert one.observe_queue([], NOW + 40) == []


def test_a_clock_that_was_set_back_makes_no_negative_wait() -> None:
    (wait,) = watch().observe_report(report(session("old"), session("ann", NOW)), {("ann", ""): NOW + 30})
    assert wait.seconds == 0


def test_a_node_that_left_takes_its_sessions_with_it() -> None:
    one = watch()
    one.forget_nodes([])
    assert one.observe_report(report(session("old"), session("ann")), {}) == []
