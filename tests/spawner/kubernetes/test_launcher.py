"""The tries of one spawn: whatever happens, its share is in a pod, given back, or kept for a pod that may appear."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes_asyncio.client.rest import ApiException
from traitlets.config import LoggingConfigurable

from gpushare_spawner.model.layers import LayerName, Placement
from gpushare_spawner.model.layers_file import KaiOptions
from gpushare_spawner.sharing.base import LayerRequest
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.attempt import NotAdmitted, PodAttempt, PodLauncher, ServerPod, Unschedulable
from gpushare_spawner.spawner.kubernetes.cluster.pods import ended_by_node
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation
from gpushare_spawner.spawner.options import Overrides
from gpushare_spawner.spawner.queue.snapshot import LayerOffer

from .parts import FakeReservations, not_admitted, pod, share

LOG = logging.getLogger("test")


class Launch:
    """A launcher whose pods do what ``outcomes`` say, one for each try: an exception, or an address."""

    def __init__(self, *outcomes: Exception | str | Callable[[], Awaitable[str]]) -> None:
        self.outcomes = list(outcomes)
        self.reservations = FakeReservations()
        self.removed = 0
        self.reserved = 1
        self.pod: dict[str, Any] | None = pod("Running")
        self.given_back: list[tuple[str, bool]] = []
        self.attempt = PodAttempt(
            Overrides(LoggingConfigurable()), lambda share, created: self.given_back.append((share.token, created))
        )
        self.attempt.reserved(share("token-1", "node-1"))
        self.start_timeout = 20.0
        self.nodes: int | None = None

    async def go(self) -> Any:
        launcher = PodLauncher(
            self.attempt,
            self.reservations,  # type: ignore[arg-type]
            ServerPod(self._reserve, self._start, self._remove, lambda: self.pod),
            self.start_timeout,
            LOG,
            "ada",
        )
        return await launcher.launch()

    async def _reserve(self) -> PodReservation:
        if self.nodes is not None and self.reserved >= self.nodes:
            raise SpawnRefused("No GPU is free.", reason="no-room")
        self.reserved += 1
        return share(f"token-{self.reserved}", f"node-{self.reserved}")

    async def _start(self) -> Any:
        assert self.attempt.admission is not None
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome if isinstance(outcome, str) else await outcome()

    async def _remove(self) -> None:
        self.removed += 1

    async def told(self) -> list[str]:
        self.attempt.retry_events.end()
        return [event["message"] async for event in self.attempt.retry_events.events()]


def refused() -> NotAdmitted:
    ended = ended_by_node(not_admitted())
    assert ended is not None
    return NotAdmitted.ended(ended)


def short_of(what: str, node: str) -> NotAdmitted:
    """The scheduler does not bring the pod onto its node."""
    return NotAdmitted.unschedulable(node, Unschedulable((what,), f"0/1 nodes are available: 1 {what}."))


async def test_a_share_whose_pod_runs_has_arrived() -> None:
    launch = Launch("http://pod:8888")
    assert await launch.go() == "http://pod:8888"
    assert launch.attempt.reservation is None
    assert launch.attempt.admission is None
    assert not launch.given_back


async def test_a_pod_that_its_node_refuses_is_tried_on_another_node() -> None:
    launch = Launch(refused(), "http://pod:8888")
    assert await launch.go() == "http://pod:8888"
    assert (launch.reservations.distrusted, launch.reservations.given_back) == (["node-1"], ["token-1"])
    assert (launch.removed, launch.reserved) == (1, 2)
    (message,) = await launch.told()
    assert message.endswith("Looking for another node.")


async def test_a_pod_of_another_layer_is_tried_again_and_no_node_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(refused(), "http://pod:8888")
    request = share().request
    offer = LayerOffer(LayerName.KAI, LayerRequest(request.tenant, request.template, KaiOptions()))
    launch.attempt.reserved(PodReservation(request, Placement("", ()), (), "token-1", offer=offer))
    tried: list[bool] = []
    reserved = launch.attempt.reserved

    def remember(share: PodReservation) -> None:
        tried.append(share.observed)
        reserved(share)

    monkeypatch.setattr(launch.attempt, "reserved", remember)
    assert await launch.go() == "http://pod:8888"
    assert (launch.reservations.distrusted, launch.reservations.given_back) == ([], ["token-1"])
    assert not launch.reservations.exclusions.of(request)
    assert tried == [False], "the node's agent may just start anew: the pod does without its library"


async def test_a_pod_that_another_layer_s_scheduler_lets_wait_is_not_taken_from_it() -> None:
    launch = Launch()
    request = share().request
    offer = LayerOffer(LayerName.KAI, LayerRequest(request.tenant, request.template, KaiOptions()))
    launch.attempt.reserved(PodReservation(request, Placement("", ()), (), "token-1", offer=offer))
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    waiting = pod("Pending", conditions=[condition])

    async def look_at_it_for_long() -> str:
        assert launch.attempt.admission is not None
        launch.attempt.admission.clock = itertools.count(step=3600.0).__next__
        for _ in range(5):
            assert not launch.attempt.admission.runs(waiting, lambda _: False)
        return "http://pod:8888"

    launch.outcomes.append(look_at_it_for_long)
    assert await launch.go() == "http://pod:8888"


async def test_the_last_try_that_fails_refuses_the_spawn_and_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.attempt.START_ATTEMPTS", 2)
    launch = Launch(refused(), refused())
    with pytest.raises(SpawnRefused, match=r"the last of 2 attempts\. Nothing is reserved") as error:
        await launch.go()
    assert (error.value.refusal, error.value.status_code) == ("not-admitted", 503)
    assert launch.reservations.given_back == ["token-1", "token-2"]
    assert launch.attempt.reservation is None
    # nothing is left for the attempt to give back
    assert not launch.given_back


async def test_nodes_that_the_scheduler_refuses_are_left_out_for_this_request_alone() -> None:
    # more of them than tries: each leaves one node less
    short = [short_of("Insufficient cpu", f"node-{number}") for number in range(1, 6)]
    launch = Launch(*short, "http://pod:8888")
    assert await launch.go() == "http://pod:8888"
    assert launch.reservations.distrusted == []
    assert sorted(launch.reservations.exclusions.of(share().request)) == [f"node-{number}" for number in range(1, 6)]
    assert launch.reservations.given_back == [f"token-{number}" for number in range(1, 6)]


async def test_when_no_node_is_left_the_user_reads_what_is_missing_where() -> None:
    launch = Launch(short_of("Insufficient cpu", "node-1"), short_of("Too many pods", "node-2"))
    launch.nodes = 2
    with pytest.raises(SpawnRefused) as error:
        await launch.go()
    assert error.value.jupyterhub_message == (
        "2 nodes could not take this server: node-1: it has too little free CPU; node-2: it already runs its "
        "maximum number of pods. No GPU is free. Nothing is reserved for you. Try again in a few minutes."
    )
    assert launch.attempt.reservation is None


async def test_a_claim_that_stays_unbound_ends_the_spawn_as_no_node_helps() -> None:
    launch = Launch(short_of("pod has unbound immediate PersistentVolumeClaims", "node-1"))
    with pytest.raises(SpawnRefused, match=r"The server cannot start: a persistent volume claim .* is not bound"):
        await launch.go()
    assert (launch.reserved, launch.removed, launch.reservations.given_back) == (1, 1, ["token-1"])
    assert not launch.reservations.exclusions.of(share().request)


async def test_an_api_that_fails_for_a_moment_is_tried_again_with_the_same_share() -> None:
    launch = Launch(ApiException(status=500), "http://pod:8888")
    assert await launch.go() == "http://pod:8888"
    assert launch.reserved == 1
    assert not launch.reservations.given_back


async def test_an_api_that_forbids_it_refuses_the_spawn_at_once() -> None:
    launch = Launch(ApiException(status=403, reason="Forbidden"))
    launch.attempt.perhaps_created = True
    with pytest.raises(SpawnRefused, match="The cluster refuses the server: 403 Forbidden"):
        await launch.go()
    # its pod may exist
    assert launch.given_back == [("token-1", True)]


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (None, r"\(the hub has not seen its pod\)"),
        (pod(conditions=[{"status": "False", "reason": "Unschedulable", "message": "no node"}]), "Unschedulable: no"),
    ],
)
async def test_a_pod_that_does_not_run_in_time_is_said_to_wait_for_something(seen: Any, why: str) -> None:
    async def for_ever() -> str:
        await asyncio.sleep(60)
        return ""

    launch = Launch(for_ever)
    launch.start_timeout, launch.pod = 0.1, seen
    with pytest.raises(SpawnRefused, match=rf"did not start within 0.1 s.*{why}") as error:
        await launch.go()
    assert error.value.refusal == "too-slow"
    assert launch.given_back == [("token-1", False)]


async def test_a_timeout_of_kubespawner_is_told_in_its_words() -> None:
    launch = Launch(TimeoutError("Could not create pod"))
    launch.pod = None
    with pytest.raises(SpawnRefused, match=r"\(Could not create pod\)"):
        await launch.go()


async def test_a_spawn_that_is_called_off_gives_its_share_back() -> None:
    async def for_ever() -> str:
        await asyncio.sleep(60)
        return ""

    launch = Launch(for_ever)
    task = asyncio.ensure_future(launch.go())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert launch.given_back == [("token-1", False)]


async def test_a_pod_that_lost_its_annotations_keeps_its_reservation(caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch("http://pod:8888")
    launch.reservations.arrives = False
    await launch.go()
    assert launch.attempt.reservation is not None
    assert "lost the annotations" in caplog.text
