"""Sessions with MIG instances, and instances that come and go while an agent runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.agent import periodic
from gpushare_spawner.agent.gpus.nvml import GONE, Gpu, GpuState
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.model.control import CloseRequest, ControlRefused, OpenRequest, ResizeRequest
from gpushare_spawner.model.frames import Feature, Kind, Role, gpu_bytes
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import MigInstance, MigProfile
from gpushare_spawner.model.report import SessionReport
from tests.agent.conftest import LIBRARIES, Agent, Eventually, request_for
from tests.agent.peers import FIRST, GIB, Peer

PARENT = "GPU-00000000-0000-0000-0000-0000000000aa"
MODEL = "Simulated A100 80 GiB"


def instance(number: int, name: str = "1g.10gb", slices: int = 1, eighths: int = 1) -> Gpu:
    profile = MigProfile(name, slices, 7, eighths, eighths * 9 * GIB)
    uuid = f"MIG-00000000-0000-0000-0000-{number:012d}"
    return Gpu(
        1, uuid, f"{MODEL} MIG {name}", profile.memory_bytes, simulated=True, mig=MigInstance(PARENT, MODEL, profile)
    )


SMALL, LARGE = instance(1), instance(2, "3g.40gb", 3, 4)


def mig(id: str, gpu: Gpu = SMALL, **changes: object) -> OpenRequest:
    """A session with 10 % of a GPU on an instance."""
    given = {"layer": LayerName.MIG, "share_units": 10, "gpus": (gpu.uuid,), "memory_limit": "100%"}
    return request_for(id, **given | {"oversubscribe": False} | changes)


class Machine(Agent):
    """An agent on a whole GPU and two instances."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gpus = (FIRST, SMALL, LARGE)
        self.there: tuple[Gpu, ...] | None = (SMALL, LARGE)
        """What NVML lists; None: it does not answer."""

    async def start(self, **changes: object) -> Node:
        self.state = StateFolder(self.path)
        self.node = Node(self.settings, self.gpus, self.source, self.state, LIBRARIES, instances=lambda: self.there)
        await self.node.start()
        return self.node

    async def request(self, request: OpenRequest) -> dict[str, str]:
        """The environment of the server."""
        answer = await self.node.requests.answer(request)
        return dict(answer["environment"])

    def session(self, id: str) -> SessionReport:
        found = self.node.report().session(id)
        assert found is not None
        return found

    def destroy(self, *gone: Gpu) -> None:
        self.there = tuple(gpu for gpu in self.there or () if gpu not in gone)
        for gpu in gone:
            self.source.states[gpu.uuid] = GpuState(healthy=False, trouble=GONE)

    @property
    def uuids(self) -> set[str]:
        return {gpu.uuid for gpu in self.node.report().gpus}


@pytest.fixture
async def machine(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    monkeypatch.setattr(periodic, "INSTANCES_EVERY", 0.05)
    made = Machine(short_folder)
    await made.start()
    yield made
    await made.stop()


async def test_session_has_its_instance_alone(machine: Machine) -> None:
    environment = await machine.request(mig("ada"))
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["NVIDIA_VISIBLE_DEVICES"] == SMALL.uuid
    assert environment["GPUSHARE_LAYER"] == "mig"
    assert Path(environment["GPUSHARE_SOCKET"]).is_socket()
    assert machine.session("ada").layer is LayerName.MIG
    assert machine.session("ada").memory_limit_bytes == SMALL.memory_bytes
    assert machine.session("ada").layer_trouble is None
    with pytest.raises(ControlRefused, match=r"GPU 1, MIG 1g\.10gb .* has 0 free units"):
        await machine.request(mig("bob", share_units=1))
    assert await machine.request(mig("bob", LARGE)) != environment
    await machine.node.requests.answer(CloseRequest(id="ada"))
    assert (await machine.request(mig("eve")))["CUDA_VISIBLE_DEVICES"] == SMALL.uuid


async def test_report_says_of_which_gpu_and_how_large_an_instance_is(machine: Machine) -> None:
    whole, small, large = machine.node.report().gpus
    assert (whole.mig, whole.capacity_units) == (None, 100)
    assert small.mig == SMALL.mig
    assert [(one.index, one.capacity_units, one.memory_bytes) for one in (small, large)] == [
        (1, 14, 9 * GIB), (1, 42, 36 * GIB)
    ]  # fmt: skip


async def test_request_that_does_not_match_the_instance_is_refused(machine: Machine) -> None:
    for request, why in (
        (mig("ada", share_units=15), "14 free units"),
        (mig("ada", FIRST), "is a whole GPU: the layer mig cannot share it"),
        (mig("ada", layer=LayerName.NATIVE), "is a MIG instance: the layer native cannot share it"),
        (mig("ada", layer=LayerName.MPS), "is a MIG instance: the layer mps cannot share it"),
        (mig("ada", share_units=100, gpus=(SMALL.uuid, LARGE.uuid)), "CUDA uses only one MIG instance"),
    ):
        with pytest.raises(ControlRefused, match=why):
            await machine.request(request)
    assert not machine.node.sessions


async def test_share_of_a_session_with_an_instance_is_fixed(machine: Machine) -> None:
    await machine.request(mig("ada"))
    with pytest.raises(ControlRefused, match="is fixed until it stops"):
        await machine.node.requests.answer(ResizeRequest(id="ada", share_units=12))


async def test_instances_that_an_admin_makes_and_destroys_are_followed(
    machine: Machine, eventually: Eventually
) -> None:
    made = instance(3, "2g.20gb", 2, 2)
    machine.there = (SMALL, LARGE, made)
    await eventually(lambda: made.uuid in machine.uuids)
    await machine.request(mig("ada", made, share_units=25))
    machine.destroy(SMALL)
    await eventually(lambda: SMALL.uuid not in machine.uuids)
    assert machine.uuids == {FIRST.uuid, LARGE.uuid, made.uuid}
    with pytest.raises(ControlRefused, match="GPU"):
        await machine.request(mig("bob", SMALL))
    machine.source.states.clear()
    machine.there = (SMALL, LARGE, made)
    await eventually(lambda: SMALL.uuid in machine.uuids)
    await machine.request(mig("bob", SMALL))


async def test_session_whose_instance_is_gone_is_told_and_the_instance_goes_with_it(
    machine: Machine, eventually: Eventually
) -> None:
    await machine.request(mig("ada"))
    machine.destroy(SMALL)
    await eventually(lambda: machine.session("ada").layer_trouble is not None)
    said = machine.session("ada").layer_trouble or ""
    assert said.startswith("GPU 1, MIG 1g.10gb was destroyed by an admin: its GPU now has other MIG instances.")
    assert "stop the server and start it again" in said
    assert SMALL.uuid in machine.uuids
    await machine.node.requests.answer(CloseRequest(id="ada"))
    await eventually(lambda: SMALL.uuid not in machine.uuids)


async def test_instance_that_was_made_anew_under_the_same_uuid_counts_with_its_new_size(
    machine: Machine, eventually: Eventually
) -> None:
    larger = instance(1, "2g.20gb", 2, 2)
    await machine.request(mig("ada"))
    machine.there = (larger, LARGE)
    await machine.node.instances.check()
    assert [gpu.capacity_units for gpu in machine.node.report().gpus if gpu.uuid == SMALL.uuid] == [14], "it is in use"
    await machine.node.requests.answer(CloseRequest(id="ada"))
    await eventually(lambda: machine.node.gpus[SMALL.uuid] == larger)
    await machine.request(mig("bob", larger, share_units=25))
    assert machine.session("bob").memory_limit_bytes == larger.memory_bytes


async def test_driver_that_does_not_answer_takes_no_instance_away(machine: Machine) -> None:
    machine.there = None
    await machine.node.instances.check()
    assert machine.uuids == {FIRST.uuid, SMALL.uuid, LARGE.uuid}


async def test_instances_of_a_gpu_that_does_not_answer_stay(machine: Machine, eventually: Eventually) -> None:
    machine.source.states[SMALL.uuid] = GpuState(healthy=False)
    machine.there = (LARGE,)
    await eventually(lambda: not machine.node.rounds.healthy(SMALL.uuid))
    await machine.node.instances.check()
    assert SMALL.uuid in machine.uuids


async def test_sessions_keep_their_instances_over_a_restart_of_the_agent(machine: Machine) -> None:
    await machine.request(mig("ada"))
    await machine.stop()
    await machine.start()
    assert machine.session("ada").gpus == (SMALL.uuid,)
    assert machine.session("ada").layer_trouble is None
    with pytest.raises(ControlRefused, match="has 0 free units"):
        await machine.request(mig("bob"))
    assert (await machine.request(mig("ada")))["CUDA_VISIBLE_DEVICES"] == SMALL.uuid


async def test_instance_that_was_destroyed_while_no_agent_ran_is_told(machine: Machine) -> None:
    path = (await machine.request(mig("ada")))["GPUSHARE_SOCKET"]
    await machine.stop()
    machine.gpus, machine.there = (FIRST,), ()
    await machine.start()
    assert "MIG instance of this server no longer exists" in (machine.session("ada").layer_trouble or "")
    peer = Peer(path)
    machine.peers.append(peer)
    await peer.connect(Role.NOTEBOOK)
    said = await peer.status()
    assert (said.known, said.measured, said.layer, said.gpu_count) == (True, False, "mig", 1)
    assert said.layer_trouble == machine.session("ada").layer_trouble


@pytest.mark.parametrize("named", [SMALL.uuid, PARENT])
async def test_gpu_work_on_an_instance_counts_by_which_of_its_uuids_a_program_knows_it(
    machine: Machine, eventually: Eventually, named: str
) -> None:
    environment = await machine.request(mig("ada"))
    assert environment["GPUSHARE_ENGINE"] == "observe"
    assert environment["LD_PRELOAD"] == str(LIBRARIES.preload)
    peer = Peer(environment["GPUSHARE_SOCKET"])
    machine.peers.append(peer)
    _, *devices = await peer.connect(features=Feature.OBSERVE)
    # a program that knows its GPU by either UUID finds itself
    assert {device.gpu for device in devices} == {gpu_bytes(SMALL.uuid), gpu_bytes(PARENT)}
    observer = Peer(environment["GPUSHARE_SOCKET"])
    machine.peers.append(observer)
    assert len(await observer.connect(Role.OBSERVER)) == 2
    server = Peer(environment["GPUSHARE_SOCKET"])
    machine.peers.append(server)
    await server.connect(Role.NOTEBOOK)
    assert [gpu.uuid for gpu in (await server.status()).gpus] == [SMALL.uuid]
    peer.send(Kind.BUSY, 0, gpu=named)
    await eventually(lambda: machine.session("ada").gpu_busy)
    peer.send(Kind.MEMORY, 0, GIB, gpu=named)
    await eventually(lambda: machine.session("ada").memory_bytes == GIB)
