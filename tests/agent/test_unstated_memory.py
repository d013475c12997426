"""What processes hold of a GPU beyond the memory that they state, by NVML's figures: contexts, and concealed memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.attribution import LARGEST, STEP, UnstatedMemory
from gpushare_spawner.agent.sessions.session import Session
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, GIB

REAL = Gpu(0, "GPU-real", "GPU", 16 * GIB)
CONTEXT = GIB // 2
MIB = 2**20


def shows(gpu: Gpu, amounts: dict[int, int | None]) -> dict[str, GpuState]:
    """Bytes by pid."""
    return {gpu.uuid: GpuState(healthy=True, processes=dict(amounts))}


def session(*stated: tuple[int, int], gpu: Gpu = REAL) -> Session:
    """With a connection for each pair of a pid and what it states; 0: it has stated nothing yet."""
    connections: dict[Any, int] = {_Connection(pid): amount for pid, amount in stated}
    memory = SimpleNamespace(stated=lambda connection, uuid: connections[connection] if uuid == gpu.uuid else 0)
    return cast(
        Session, SimpleNamespace(cuda=set(connections), memory=memory, gpus=(gpu,), suspended=False, context_bytes=0)
    )


class _Connection:
    def __init__(self, pid: int) -> None:
        self.peer = SimpleNamespace(pid=pid)


def made(gpu: Gpu = REAL) -> UnstatedMemory:
    return UnstatedMemory({gpu.uuid: gpu}, CONTEXT)


def concealed(
    memory: UnstatedMemory, states: dict[str, GpuState], sessions: list[Session]
) -> dict[tuple[int, str], int]:
    memory.update(states, sessions)
    return memory.amounts


def contexts(memory: UnstatedMemory, states: dict[str, GpuState], one: Session) -> int:
    memory.update(states, [one])
    return one.context_bytes


def test_what_a_process_holds_beyond_its_context_and_what_all_its_connections_state_counts() -> None:
    sessions = [session((1, GIB), (1, GIB)), session((2, 3 * GIB), (3, 0), (4, 0))]
    states = shows(REAL, {1: 3 * GIB, 2: 3 * GIB, 3: GIB, 4: None, 9: 8 * GIB})
    assert concealed(made(), states, sessions) == {(1, REAL.uuid): GIB // 2, (3, REAL.uuid): GIB // 2}


def test_small_differences_do_not_count_and_larger_ones_in_steps() -> None:
    memory, sessions = made(), [session((1, GIB))]
    for beyond, counts in ((STEP - 1, {}), (STEP, {(1, REAL.uuid): STEP}), (3 * STEP - 1, {(1, REAL.uuid): 2 * STEP})):
        assert concealed(memory, shows(REAL, {1: GIB + CONTEXT + beyond}), sessions) == counts


def test_memory_that_was_just_freed_is_not_taken_for_unstated() -> None:
    memory = made()
    still = shows(REAL, {1: 8 * GIB + CONTEXT})
    assert concealed(memory, still, [session((1, 8 * GIB))]) == {}
    assert concealed(memory, still, [session((1, GIB))]) == {}, "the driver was asked before it was freed"
    assert concealed(memory, still, [session((1, GIB))]) == {(1, REAL.uuid): 7 * GIB}


def test_simulated_gpus_have_no_contexts() -> None:
    found = concealed(made(FIRST), shows(FIRST, {1: CONTEXT}), [session((1, 0), gpu=FIRST)])
    assert found == {(1, FIRST.uuid): CONTEXT}


def test_figures_of_a_gpu_stay_while_another_is_polled() -> None:
    other = Gpu(1, "GPU-other", "GPU", 16 * GIB)
    memory = UnstatedMemory({gpu.uuid: gpu for gpu in (REAL, other)}, CONTEXT)
    one = session((1, 0))
    memory.update(shows(REAL, {1: GIB}), [one])
    memory.update(shows(other, {}), [one])
    assert memory.amounts == {(1, REAL.uuid): GIB // 2}
    assert one.context_bytes == GIB


def test_context_is_what_the_driver_shows_beyond_the_stated_memory() -> None:
    assert contexts(made(), shows(REAL, {7: 900 * MIB}), session((7, 600 * MIB))) == 300 * MIB


def test_context_is_not_forgotten_while_managed_memory_is_paged_out() -> None:
    memory, one = made(), session((7, 600 * MIB))
    contexts(memory, shows(REAL, {7: 900 * MIB}), one)
    assert contexts(memory, shows(REAL, {7: 350 * MIB}), one) == 300 * MIB


def test_contexts_of_all_processes_add_up_and_a_suspended_session_has_none() -> None:
    memory, one = made(), session((7, 0), (8, 0), (9, 50 * MIB))
    assert contexts(memory, shows(REAL, {7: 300 * MIB, 8: 200 * MIB, 9: None}), one) == 500 * MIB
    one.suspended = True
    assert contexts(memory, shows(REAL, {}), one) == 0


def test_memory_that_a_process_does_not_state_is_no_context_beyond_a_bound() -> None:
    assert contexts(made(), shows(REAL, {7: 20 * LARGEST}), session((7, 0))) == LARGEST


async def test_the_arbiter_reckons_with_memory_that_a_process_does_not_state(agent: Agent) -> None:
    await agent.peer(agent.open("eve"))
    (pid,) = {connection.peer.pid for connection in agent.node.sessions["eve"].cuda}
    roster = agent.node.arbitrations[FIRST.uuid]._arbiter._roster
    for held, left in ((7 * GIB, 9 * GIB), (STEP, 16 * GIB - STEP), (0, 16 * GIB)):
        agent.node._memory_seen(shows(FIRST, {pid: held}))
        assert roster.vram_budget().for_managed == left
