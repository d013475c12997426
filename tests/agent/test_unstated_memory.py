"""What processes hold of a GPU beyond their claims, by NVML's figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.attribution import STEP, UnstatedMemory, stated_bytes
from gpushare_spawner.agent.sessions.session import Session
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, GIB

REAL = Gpu(0, "GPU-real", "GPU", 16 * GIB)
CONTEXT = GIB // 2


def shows(gpu: Gpu, amounts: dict[int, int | None]) -> dict[str, GpuState]:
    """Bytes by pid."""
    processes = dict(amounts.items())
    return {gpu.uuid: GpuState(healthy=True, processes=processes)}


def session(*claims: tuple[int, int], gpu: Gpu = REAL) -> Session:
    """With a connection for each pair of a pid and what it claims; 0: it has claimed nothing yet."""
    connections = {_Connection(pid): {gpu.uuid: claim} if claim else {} for pid, claim in claims}
    return cast(Session, SimpleNamespace(cuda=set(connections), claims=connections))


class _Connection:
    def __init__(self, pid: int) -> None:
        self.peer = SimpleNamespace(pid=pid)


def looked(memory: UnstatedMemory, states: dict[str, GpuState], sessions: list[Session]) -> dict[tuple[int, str], int]:
    return memory.update(states, stated_bytes(states, sessions))


def test_what_a_process_holds_beyond_its_context_and_the_claims_of_all_its_connections_counts() -> None:
    memory = UnstatedMemory({REAL.uuid: REAL}, CONTEXT)
    sessions = [session((1, GIB), (1, GIB)), session((2, 3 * GIB), (3, 0), (4, 0))]
    states = shows(REAL, {1: 3 * GIB, 2: 3 * GIB, 3: GIB, 4: None, 9: 8 * GIB})
    assert looked(memory, states, sessions) == {(1, REAL.uuid): GIB // 2, (3, REAL.uuid): GIB // 2}


def test_small_differences_do_not_count_and_larger_ones_in_steps() -> None:
    memory = UnstatedMemory({REAL.uuid: REAL}, CONTEXT)
    sessions = [session((1, GIB))]
    for beyond, counts in ((STEP - 1, {}), (STEP, {(1, REAL.uuid): STEP}), (3 * STEP - 1, {(1, REAL.uuid): 2 * STEP})):
        assert looked(memory, shows(REAL, {1: GIB + CONTEXT + beyond}), sessions) == counts


def test_memory_that_was_just_freed_is_not_taken_for_unstated() -> None:
    memory = UnstatedMemory({REAL.uuid: REAL}, CONTEXT)
    still = shows(REAL, {1: 8 * GIB + CONTEXT})
    assert looked(memory, still, [session((1, 8 * GIB))]) == {}
    assert looked(memory, still, [session((1, GIB))]) == {}, "the driver was asked before it was freed"
    assert looked(memory, still, [session((1, GIB))]) == {(1, REAL.uuid): 7 * GIB}


def test_simulated_gpus_have_no_contexts() -> None:
    memory = UnstatedMemory({FIRST.uuid: FIRST}, CONTEXT)
    found = looked(memory, shows(FIRST, {1: CONTEXT}), [session((1, 0), gpu=FIRST)])
    assert found == {(1, FIRST.uuid): CONTEXT}


async def test_the_arbiter_reckons_with_memory_that_a_process_does_not_claim(agent: Agent) -> None:
    await agent.peer(agent.open("eve"))
    (pid,) = {connection.peer.pid for connection in agent.node.sessions["eve"].cuda}
    roster = agent.node.arbitrations[FIRST.uuid]._arbiter._roster
    for held, left in ((7 * GIB, 9 * GIB), (STEP, 16 * GIB - STEP), (0, 16 * GIB)):
        agent.node._memory_seen(shows(FIRST, {pid: held}))
        assert roster.vram_budget().for_managed == left
