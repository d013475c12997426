"""Amounts of GPU time from the agents' reports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import Prices
from gpushare_spawner.model.report import DeliveredReport, EndedSession, GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.history.recorder import OLDEST, Meter
from gpushare_spawner.service.history.store import HOUR, GpuTimeAmounts, SessionCounters

BEGIN = 1_000_000 * HOUR
"""The start of an hour."""
ONE_GPU = (GpuReport(index=0, uuid="GPU-0", model="A100", memory_bytes=2**30),)


def session(**changes: Any) -> SessionReport:
    """A quarter that was opened at BEGIN."""
    values: dict[str, Any] = {
        "id": "ann", "user": "ann", "template": "quarter", "gpus": ("GPU-0",), "share_units": 25, "opened_at": BEGIN,
        "tier_since": BEGIN, "effective_units": 25, "guaranteed_units": 25,
    }  # fmt: skip
    return SessionReport(**(values | changes))


def report(at: float, *sessions: SessionReport, node: str = "n") -> Report:
    return Report(node=node, published_at=at, gpus=ONE_GPU, sessions=sessions)


def observe(meter: Meter, *reports: Report) -> None:
    for one in reports:
        meter.observe(one, lambda session: "ml" if session.user == "ann" else "")


def total(meter: Meter) -> GpuTimeAmounts:
    whole = GpuTimeAmounts()
    for amounts in meter.take()[0].values():
        whole = whole.plus(amounts)
    return whole


def test_a_quarter_reserves_a_quarter_of_the_time() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 10, session()), report(BEGIN + 400, session()))
    assert total(meter).reserved == pytest.approx(100)


def test_time_without_bursts_is_idle_and_the_rest_is_not() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 400, session(gpu_seconds=100)))
    amounts = total(meter)
    assert (amounts.used, amounts.idle, amounts.reserved) == pytest.approx((100, 75, 100))


def test_no_session_works_longer_than_time_passes_whatever_its_node_reports() -> None:
    meter = Meter()
    lie = DeliveredReport(entitled_seconds=1e9, delivered_seconds=1e9)
    observe(meter, report(BEGIN + 400, session(gpu_seconds=1e9, delivered=lie)))
    amounts = total(meter)
    assert (amounts.used, amounts.entitled, amounts.delivered) == pytest.approx((400, 400, 400))


def test_what_a_tier_takes_is_recovered_from_the_moment_of_the_change_on() -> None:
    meter = Meter()
    observe(
        meter,
        report(BEGIN + 100, session()),
        report(BEGIN + 300, session(tier=Tier.RELEASED, tier_since=BEGIN + 200, effective_units=0)),
    )
    assert total(meter).recovered == pytest.approx(25)


def test_counters_are_what_they_grew_by() -> None:
    meter = Meter()
    first = DeliveredReport(entitled_seconds=10, delivered_seconds=9, waits=3)
    second = DeliveredReport(entitled_seconds=30, delivered_seconds=27, waits=5)
    observe(meter, report(BEGIN + 10, session(delivered=first)))
    total(meter)
    observe(meter, report(BEGIN + 20, session(delivered=second)))
    amounts = total(meter)
    assert (amounts.entitled, amounts.delivered, amounts.waits) == pytest.approx((20, 18, 2))


def test_an_agent_that_lost_its_state_counts_from_zero_again() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session(gpu_seconds=50)))
    total(meter)
    observe(meter, report(BEGIN + 200, session(gpu_seconds=20)))
    assert total(meter).used == pytest.approx(20)


def test_a_server_that_is_started_again_is_counted_from_its_start() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session(gpu_seconds=50)))
    total(meter)
    observe(meter, report(BEGIN + 200, session(opened_at=BEGIN + 180, tier_since=BEGIN + 180, gpu_seconds=60)))
    amounts = total(meter)
    assert (amounts.reserved, amounts.used) == pytest.approx((5, 60))


def test_a_reservation_that_is_not_confirmed_counts_only_once_it_is() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session(confirmed=False)))
    assert meter.take() == ({}, [], [])
    observe(meter, report(BEGIN + 200, session()))
    assert total(meter).reserved == pytest.approx(50)


def test_each_of_several_gpus_has_its_part() -> None:
    meter = Meter()
    gpus = tuple(GpuReport(index=k, uuid=f"GPU-{k}", model="A100", memory_bytes=1) for k in range(2))
    two = session(gpus=("GPU-0", "GPU-1"), share_units=100, effective_units=100, guaranteed_units=100, gpu_seconds=40)
    meter.observe(Report(node="n", published_at=BEGIN + 100, gpus=gpus, sessions=(two,)), lambda session: "")
    amounts = meter.take()[0]
    assert {subject.gpu: (amount.reserved, amount.used) for (_, subject), amount in amounts.items()} == {
        "GPU-0": (100, 20),
        "GPU-1": (100, 20),
    }


def test_a_gpu_with_fewer_units_has_a_smaller_part() -> None:
    meter = Meter()
    gpus = tuple(GpuReport(index=k, uuid=f"GPU-{k}", model="A100", memory_bytes=1) for k in range(2))
    more = session(
        gpus=("GPU-0", "GPU-1"), share_units=100, last_units=50, effective_units=60, guaranteed_units=60,
        tier_since=BEGIN, borrowed_units=70,
    )  # fmt: skip
    meter.observe(Report(node="n", published_at=BEGIN + 100, gpus=gpus, sessions=(more,)), lambda session: "")
    amounts = meter.take()[0]
    found = {
        subject.gpu: (amount.reserved, amount.recovered, amount.borrowed) for (_, subject), amount in amounts.items()
    }
    assert found == {"GPU-0": pytest.approx((100, 40, 70)), "GPU-1": pytest.approx((50, 0, 20))}


def test_subjects_say_who_and_where() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session(server="thesis")))
    ((hour, subject),) = meter.take()[0]
    assert hour == BEGIN
    assert (subject.user, subject.server, subject.template, subject.group) == ("ann", "thesis", "quarter", "ml")
    assert (subject.node, subject.gpu, subject.model) == ("n", "GPU-0", "A100")


def test_a_session_of_another_layer_reserves_and_what_it_uses_is_not_known() -> None:
    meter = Meter()
    said = session(layer=LayerName.KAI, gpus=("kai/ann/0",), gpu_use_known=False)
    observe(meter, report(BEGIN + 10, said), report(BEGIN + 400, said))
    ((_, subject), amounts) = next(iter(meter.take()[0].items()))
    assert (subject.gpu, subject.model) == ("kai", "")
    assert (amounts.reserved, amounts.idle, amounts.used) == pytest.approx((100, 0, 0))


def test_a_session_of_another_layer_that_is_observed_has_idle_time() -> None:
    meter = Meter()
    said = session(layer=LayerName.KAI, gpus=("kai/ann/0",))
    observe(meter, report(BEGIN + 10, said), report(BEGIN + 400, said.model_copy(update={"gpu_seconds": 90.0})))
    ((_, subject), amounts) = next(iter(meter.take()[0].items()))
    assert subject.gpu == "kai"
    assert (amounts.reserved, amounts.idle, amounts.used) == pytest.approx((100, 75 + 2.5, 90))


def test_time_is_divided_among_the_hours_in_which_it_went_by() -> None:
    meter = Meter()
    late = session(opened_at=BEGIN + HOUR - 60, tier_since=BEGIN + HOUR - 60)
    observe(meter, report(BEGIN + 2 * HOUR + 60, late))
    hours = {hour - BEGIN: amounts.reserved for (hour, _), amounts in meter.take()[0].items()}
    assert hours == pytest.approx({0: 15, HOUR: 900, 2 * HOUR: 15})


def test_an_older_report_counts_nothing() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 200, session()))
    before = total(meter)
    observe(meter, report(BEGIN + 100, session()), report(BEGIN + 200, session()))
    assert before.reserved == pytest.approx(50)
    assert meter.take()[0] == {}


def test_a_session_that_ended_is_named_once() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session()))
    meter.take()
    observe(meter, report(BEGIN + 110), report(BEGIN + 120))
    assert meter.take() == ({}, [], [("n", "ann")])


def test_nodes_do_not_end_each_others_sessions() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session()), report(BEGIN + 110, node="other"))
    assert meter.take()[2] == []


def test_what_could_not_be_stored_comes_again() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session()))
    taken = meter.take()
    observe(meter, report(BEGIN + 200, session()))
    meter.give_back(taken)
    amounts, counted, _ = meter.take()
    assert sum(one.reserved for one in amounts.values()) == pytest.approx(50)
    assert [one.seen_at for one in counted] == [BEGIN + 200]


@given(st.lists(st.floats(0.1, 5000), min_size=1, max_size=8), st.integers(0, 8))
def test_a_restart_at_any_moment_counts_the_same(pauses: list[float], restart_after: int) -> None:
    """The counters that were stored are all that a new meter needs."""
    whole, first = Meter(), Meter()
    parts, at = GpuTimeAmounts(), float(BEGIN)
    counted: list[SessionCounters] = []
    for number, pause in enumerate(pauses):
        at += pause
        now = session(gpu_seconds=(at - BEGIN) / 3, effective_units=25 if number % 2 else 10, tier_since=at - pause / 2)
        observe(whole, report(at, now))
        if number == restart_after:
            first = Meter(counted)
        observe(first, report(at, now))
        amounts, counted, _ = first.take()
        for one in amounts.values():
            parts = parts.plus(one)
    expected = total(whole)
    assert parts.reserved == pytest.approx(expected.reserved)
    assert parts.reserved == pytest.approx(0.25 * (at - BEGIN))
    assert (parts.idle, parts.recovered, parts.used) == pytest.approx(
        (expected.idle, expected.recovered, expected.used)
    )
    assert expected.idle <= expected.reserved + 1e-6
    assert expected.recovered <= expected.reserved + 1e-6


def test_a_node_whose_clock_began_in_1970_adds_a_month_at_most() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 10, session(opened_at=0.0)))
    amounts = meter.take()[0]
    assert len(amounts) <= 31 * 24 + 1
    assert sum(one.reserved for one in amounts.values()) == pytest.approx(31 * 86400 / 4)


def test_a_node_whose_clock_goes_to_and_fro_adds_no_more_than_the_time_that_passes() -> None:
    """Its users' groups would pay for weeks in seconds."""
    now = [50.0]
    meter = Meter(steady=lambda: now[0])
    observe(meter, report(BEGIN + 10, session()))
    total(meter)
    for second in range(100):
        now[0] += 1
        observe(meter, report(BEGIN + 10 + second + 20 * 24 * HOUR, session()), report(BEGIN + 10 + second, session()))
    assert total(meter).reserved <= (100 + OLDEST) / 4
    now[0] += 400
    observe(meter, report(BEGIN + 510, session()))
    assert total(meter).reserved == pytest.approx(400 / 4, rel=0.1), "what is true counts again"


def test_counting_goes_on_after_a_clock_was_set_back() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 10 * HOUR, session()))
    meter.take()
    observe(meter, report(BEGIN + HOUR, session(gpu_seconds=5)), report(BEGIN + HOUR + 100, session(gpu_seconds=5)))
    amounts = total(meter)
    assert (amounts.reserved, amounts.used) == pytest.approx((25, 5))
    observe(meter, report(BEGIN + 10 * HOUR, session()), report(BEGIN + HOUR))
    assert meter.take()[2] == [("n", "ann")]


PRICES = Prices.model_validate(
    {
        "gpu_hours": [
            {"models": ["*A100*"], "start": "22:00", "end": "06:00", "gpu_hour": 1},
            {"models": ["*A100*"], "gpu_hour": 4},
            {"gpu_hour": 9},
        ],
        "energy": 0.5,
        "co2": 400,
    }
)


def test_cost_follows_the_model_and_the_time_of_day_and_lent_time_is_saved() -> None:
    meter = Meter()
    meter.prices = lambda: PRICES
    midnight = BEGIN // (24 * HOUR) * 24 * HOUR
    opened = session(opened_at=midnight + 5 * HOUR, tier_since=midnight + 5 * HOUR)
    observe(meter, report(midnight + 5 * HOUR, opened))
    # from 05:00 to 07:00; the share is released and lent from 06:30 on
    changes = {"tier": Tier.RELEASED, "tier_since": midnight + 6.5 * HOUR, "effective_units": 0}
    observe(meter, report(midnight + 6.5 * HOUR, opened))
    observe(meter, report(midnight + 7 * HOUR, opened.model_copy(update=changes)))
    amounts = total(meter)
    assert amounts.cost == pytest.approx(0.25 * (1 * 1 + 0.5 * 4))
    assert amounts.saved == pytest.approx(0.25 * 0.5 * 4)
    assert amounts.held == pytest.approx(0.25 * 1.5 * HOUR)


def test_energy_has_a_price_and_co2() -> None:
    meter = Meter()
    meter.prices = lambda: PRICES.model_copy(update={"gpu_hours": ()})
    observe(meter, report(BEGIN, session()), report(BEGIN + 3600, session(energy_joules=7.2e5)))
    amounts = total(meter)
    assert (amounts.energy, amounts.cost, amounts.co2) == pytest.approx((7.2e5, 0.2 * 0.5, 0.2 * 400))


def test_a_node_cannot_claim_more_energy_than_any_gpu_uses() -> None:
    meter = Meter()
    observe(meter, report(BEGIN, session()), report(BEGIN + 400, session(energy_joules=1e15)))
    assert total(meter).energy <= 400 * 10_000


def ended(at: float, **changes: Any) -> EndedSession:
    values = {"id": "ann", "opened_at": BEGIN, "ended_at": at, "effective_units": 25, "tier_since": BEGIN}
    return EndedSession(**(values | changes))


def test_the_last_seconds_of_a_session_that_ended_count_once() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session()))
    last = report(BEGIN + 200).model_copy(update={"ended": (ended(BEGIN + 160, gpu_seconds=12.0),)})
    observe(meter, last, last.model_copy(update={"published_at": BEGIN + 210}))
    amounts = total(meter)
    assert (amounts.reserved, amounts.used) == pytest.approx((40, 12))


def test_a_restarted_server_counts_until_its_end_and_from_its_new_start() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session()))
    again = session(opened_at=BEGIN + 180, tier_since=BEGIN + 180)
    observe(meter, report(BEGIN + 200, again).model_copy(update={"ended": (ended(BEGIN + 160),)}))
    assert total(meter).reserved == pytest.approx(25 * 1.8)


def test_a_session_that_was_never_observed_is_not_counted_by_its_end() -> None:
    # on Kubernetes nothing vouches for it: a node could invent it
    meter = Meter()
    observe(meter, report(BEGIN + 200).model_copy(update={"ended": (ended(BEGIN + 160), ended(BEGIN, id="x"))}))
    assert total(meter) == GpuTimeAmounts()


def test_a_session_that_ended_while_no_service_ran_is_counted_by_the_stored_record() -> None:
    meter = Meter()
    observe(meter, report(BEGIN + 100, session(quota="group:optics")))
    _, counters, _ = meter.take()
    again = Meter(counters)
    observe(again, report(BEGIN + 900).model_copy(update={"ended": (ended(BEGIN + 500),)}))
    taken, _, gone = again.take()
    [((_, subject), amounts)] = taken.items()
    assert (subject.user, subject.account) == ("ann", "group:optics")
    assert amounts.reserved == pytest.approx(100)
    assert gone == [("n", "ann")]
