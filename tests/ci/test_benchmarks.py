"""Benchmarks are no tests, and nobody runs them daily: what they import must still be there, and they must end."""

from __future__ import annotations

import asyncio
import csv
import importlib
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

import benchmarks
from benchmarks import placement, placement_cluster, placement_loop, placement_trace, queue
from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.ledger import LedgerError
from gpushare_spawner.placement.strategy import BestFit
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import LoopBreaks
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest

MODULES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def test_the_event_loop_of_a_small_cluster_is_measured_and_its_ledger_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_loop, "WAIT_ON", 0.05)
    monkeypatch.setattr(placement_loop, "START_SECONDS", (0.01, 0.05))
    found = asyncio.run(placement_loop.measure(160, 20, seed=1))
    assert found["waiting"] == placement_loop.WAITING
    assert 0 < found["loop_ms"] < 1000


async def test_every_node_reports_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_loop, "REPORT_EVERY", 0.01)
    hub = placement_loop.SimulatedHub(placement_cluster.cluster(32, seed=1), 1)
    shown: Counter[str] = Counter()
    monkeypatch.setattr(hub, "show", lambda config_map: shown.update([config_map["metadata"]["name"]]))
    reporting = asyncio.create_task(hub.report())
    while len(shown) < len(hub.nodes) or min(shown.values()) < 3:
        await asyncio.sleep(0.001)
    reporting.cancel()
    assert max(shown.values()) - min(shown.values()) <= 1
    for watch in (hub.pods.watch_task, hub.reports.watch_task):
        watch.cancel()


async def test_the_ledger_is_checked_after_a_reading_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that has just come counts beside its reservation between two pieces of a reading: here for a whole GPU."""
    hub = placement_loop.SimulatedHub(placement_cluster.cluster(32, seed=1), 1)
    whole = placement_loop.template(Share(), "whole")
    share = await hub.reservations.reserve(SpawnRequest(Tenant("ada"), whole), 10.0)
    ledger = hub.reservations.feed.ledger
    check_ledger(ledger)

    async def pause(breaks: LoopBreaks) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(LoopBreaks, "pause_if_due", pause)
    # no pass over the queue comes after the pod
    monkeypatch.setattr(hub.reservations, "place_soon", lambda: None)
    hub.run(share)
    reading = asyncio.create_task(hub.reservations.snapshot())

    async def checked_meanwhile() -> None:
        while not reading.done():
            check_ledger(ledger)
            await asyncio.sleep(0)

    with pytest.raises(LedgerError, match="200 units are owned, its capacity is 100"):
        await checked_meanwhile()
    assert not reading.done()
    await placement_loop.check_hub(hub)
    await reading
    for watch in (hub.pods.watch_task, hub.reports.watch_task):
        watch.cancel()


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("32", "of 60 starts find no place on 32 GPUs: give fewer --starts"),
        ("16", "need a node of each model: give at least 32 --gpus"),
    ],
)
def test_a_cluster_that_is_too_small_ends_the_measurement_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: str, said: str
) -> None:
    monkeypatch.setattr(placement_loop, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(sys, "argv", ["placement_loop", "--gpus", gpus, "--starts", "60"])
    with pytest.raises(SystemExit) as end:
        placement_loop.main()
    assert end.value.code == 1
    assert said in capsys.readouterr().err


def test_the_ledger_agrees_after_placements_one_by_one() -> None:
    feed, _ = placement.filled(placement_cluster.cluster(160, seed=1))
    shares = random.Random(1).choices(placement_cluster.SHARES, k=60)
    _, places = placement.measure(feed.ledger, shares, BestFit())
    assert sum(place is not None for place in places) > 20
    check_ledger(feed.ledger)


@pytest.mark.parametrize("strategy", placement_trace.STRATEGIES)
def test_the_ledger_agrees_after_a_trace(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    nodes = [placement_trace.Node(f"node-{number}", 64_000, 2**38, 8, "T4") for number in range(2)]
    pods = [placement_trace.Pod(1000, 2**30, count, milli, "") for count, milli in ((1, 250), (1, 1000), (2, 1000))]
    monkeypatch.setattr(placement_trace, "read_nodes", lambda data: nodes)
    monkeypatch.setattr(placement_trace, "read_pods", lambda data, trace: pods)
    assert placement_trace.allocated(Path(), "any", 1, strategy) > 80


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "within"), [("random", 0.5), ("paper_best_fit", 0.3), ("fgd", 0.3)])
def test_published_figures_of_openb_are_reproduced(strategy: str, within: float) -> None:
    """One seed; the published figures are means of ten."""
    data = placement_trace.find_data(None)
    if data is None:
        pytest.skip("the openb traces are not here")
    with (data / "fgd_expected.csv").open(newline="") as lines:
        published = {row["trace"]: row for row in csv.DictReader(lines)}["default"]
    column = {"random": "01-Random", "paper_best_fit": "05-BestFit", "fgd": "06-FGD"}[strategy]
    assert placement_trace.allocated(data, "default", 42, strategy) == pytest.approx(
        float(published[column]), abs=within
    )


@pytest.mark.parametrize("policy", queue.POLICIES)
async def test_the_simulated_queue_serves_small_spawns_beside_big_ones(policy: str) -> None:
    outcome = await queue.Hub(queue.SCENARIOS["cpu"], policy, 0.2, seed=2, warm_up=0.1).run()
    assert len(outcome.waits[False]) > 80
    assert outcome.needless == 0
    if policy == "ours":
        assert outcome.mean_wait(is_big=False) < 120


def test_the_queue_meets_its_bars_if_no_small_spawn_waits_needlessly_and_no_big_one_longer() -> None:
    waits = {"ours": 10.0, "first_fit": 10.0}
    assert queue.meets_bars({"needless_waits": 0, "big_wait_mean_s": waits})
    assert not queue.meets_bars({"needless_waits": 1, "big_wait_mean_s": waits})
    assert not queue.meets_bars({"needless_waits": 0, "big_wait_mean_s": {**waits, "ours": 10.1}})
