"""Sessions whose memory leaves the GPU only as a whole: turns, order, memory that is promised once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageOut, Revoke, RevokeReason
from tests.arbiter.virtual_gpu import GIB

VRAM = 16 * GIB


class Gpu:
    """An arbiter with sessions of one client each, and what it has decided."""

    def __init__(self, context_bytes: int = 0) -> None:
        self.arbiter = GpuArbiter(VRAM, ArbiterSettings(context_bytes=context_bytes))
        self.now = 0.0
        self.leases: dict[str, int] = {}
        self.page_outs: dict[str, int] = {}
        self.revoked: dict[str, Revoke] = {}
        self.suspensions: list[str] = []
        self.sizes: dict[str, tuple[int, int]] = {}
        """Managed and plain bytes, as a client says when it asks."""

    def tell(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            name = str(decision.client)
            match decision:
                case LeaseGrant(lease=lease):
                    self.leases[name] = lease
                case Revoke():
                    self.revoked[name] = decision
                case PageOut(amount=amount):
                    self.page_outs[name] = amount
        self.suspensions += self.arbiter.suspensions()

    def join(self, name: str, gib: float, whole: bool = True, session: str = "", weight: int = 25) -> None:
        """A client that has so much memory; managed where it is not `whole`. Its session where it has none yet."""
        amount = int(gib * GIB)
        if not session:
            self.tell(self.arbiter.add_session(name, weight, self.now, suspends=whole))
        self.tell(self.arbiter.connect(name, session or name, self.now))
        self.sizes[name] = (0, amount) if whole else (amount, 0)

    def ask(self, name: str) -> None:
        self.now += 0.001
        self.tell(self.arbiter.request(name, *self.sizes[name], self.now))

    def give_back(self, name: str) -> None:
        self.now += 0.001
        self.revoked.pop(name, None)
        self.tell(self.arbiter.memory(name, *self.sizes[name], self.now))
        self.tell(self.arbiter.release(name, self.leases.pop(name), 0.0, self.now))

    def use(self, name: str) -> None:
        self.ask(name)
        self.give_back(name)

    def suspended(self, name: str, seconds: float = 1.0) -> None:
        self.now += seconds
        self.suspensions.remove(name)
        self.tell(self.arbiter.suspended(name, self.sizes[name][1], seconds, self.now))

    def suspend(self, name: str) -> None:
        """Another session needs all memory for a moment."""
        self.join("huge", VRAM / GIB)
        self.ask("huge")
        self.suspended(name)
        self.give_back("huge")
        self.tell(self.arbiter.remove_session("huge", self.now))

    def until_revoked(self, name: str) -> None:
        for _ in range(100):
            if name in self.revoked:
                return
            due = self.arbiter.next_wakeup()
            assert due is not None
            self.now = due
            self.tell(self.arbiter.tick(self.now))
        pytest.fail(f"{name} was not revoked")


def test_sessions_that_fit_together_run_together_and_none_is_suspended() -> None:
    gpu = Gpu()
    gpu.join("a", 7)
    gpu.join("b", 8)
    gpu.ask("a")
    gpu.ask("b")
    assert gpu.leases.keys() == {"a", "b"}
    gpu.give_back("a")
    assert gpu.suspensions == []


def test_session_waits_until_the_one_in_its_way_is_suspended() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.join("b", 10)
    gpu.ask("a")
    gpu.ask("b")
    gpu.until_revoked("a")
    assert gpu.revoked["a"].page_out == 0
    assert gpu.suspensions == []
    gpu.give_back("a")
    assert (gpu.suspensions, gpu.leases) == (["a"], {})
    gpu.ask("a")  # it goes on as soon as it may
    assert gpu.leases == {}
    gpu.suspended("a")
    assert gpu.leases.keys() == {"b"}
    view = gpu.arbiter.session_snapshot("a")
    assert (view.resident_bytes, view.paged_out_bytes, view.memory_bytes) == (0, 10 * GIB, 10 * GIB)
    gpu.until_revoked("b")
    gpu.give_back("b")
    gpu.suspended("b")
    assert gpu.leases.keys() == {"a"}
    assert gpu.arbiter.session_snapshot("a").resident_bytes == 10 * GIB


def test_released_session_is_suspended_though_nobody_needs_its_memory() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.ask("a")
    gpu.tell(gpu.arbiter.set_weight("a", 0, gpu.now))
    assert gpu.revoked["a"].reason is RevokeReason.RELEASED
    assert gpu.suspensions == []
    gpu.give_back("a")
    assert gpu.suspensions == ["a"]
    gpu.suspended("a")
    gpu.ask("a")  # it is back before a weight is set
    assert gpu.leases.keys() == {"a"}
    assert gpu.suspensions == []


def test_released_session_does_not_keep_its_place_for_a_pause() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.suspend("a")
    gpu.ask("a")
    gpu.tell(gpu.arbiter.resumed("a", 10 * GIB, 30.0, gpu.now))
    gpu.give_back("a")
    for _ in range(5):
        gpu.now += 3.0
        gpu.use("a")
    gpu.now += 1.0
    gpu.tell(gpu.arbiter.set_weight("a", 0, gpu.now))
    assert gpu.suspensions == ["a"]


def test_released_session_that_asks_already_or_cannot_be_suspended_stays_on_the_gpu() -> None:
    gpu = Gpu()
    for name in ("pinned", "empty", "managed", "asks"):
        gpu.join(name, 0 if name == "empty" else 3, whole=name != "managed")
        gpu.use(name)
    gpu.tell(gpu.arbiter.set_suspendable("pinned", False, gpu.now))
    gpu.ask("asks")
    for name in ("pinned", "empty", "managed", "asks"):
        gpu.tell(gpu.arbiter.set_weight(name, 0, gpu.now))
    gpu.ask("asks")  # before it has given its lease back
    gpu.give_back("asks")
    assert gpu.leases.keys() == {"asks"}
    assert gpu.suspensions == []
    gpu.tell(gpu.arbiter.set_suspendable("pinned", True, gpu.now))
    assert gpu.suspensions == ["pinned"]


def test_least_recently_used_session_goes_first_and_none_in_vain() -> None:
    gpu = Gpu()
    for name, gib in (("old", 5), ("middle", 4), ("new", 5)):
        gpu.join(name, gib)
        gpu.use(name)
    gpu.join("small", 4)
    gpu.ask("small")
    assert gpu.suspensions == ["old"]
    gpu.suspended("old")
    gpu.give_back("small")
    gpu.join("large", 10)
    gpu.ask("large")  # of 9 and 4 GiB beside it, `middle` alone does not make the room, `new` and `middle` do
    assert sorted(gpu.suspensions) == ["middle", "new"]


def test_session_that_is_not_enough_by_itself_is_spared_where_the_next_one_is() -> None:
    gpu = Gpu()
    for name, gib in (("old", 2), ("new", 9)):
        gpu.join(name, gib)
        gpu.use(name)
    gpu.join("comer", 12)
    gpu.ask("comer")
    assert gpu.suspensions == ["new"]


def test_memory_of_all_processes_counts_once_and_moves_together() -> None:
    gpu = Gpu()
    gpu.join("a", 6)
    gpu.join("a2", 5, session="a")
    gpu.ask("a")
    gpu.ask("a2")
    assert gpu.leases.keys() == {"a", "a2"}
    gpu.join("b", 4)
    gpu.ask("b")
    assert gpu.leases.keys() == {"a", "a2", "b"}
    gpu.give_back("b")
    gpu.give_back("a")
    gpu.join("c", 6)
    gpu.ask("c")
    assert "c" not in gpu.leases  # one of a's processes still works
    gpu.give_back("a2")
    assert "a" in gpu.suspensions


def test_managed_session_waits_for_a_suspension_and_managed_pages_leave_too() -> None:
    gpu = Gpu()
    gpu.join("whole", 6)
    gpu.use("whole")
    gpu.join("m", 8, whole=False)
    gpu.use("m")
    gpu.join("comer", 11, whole=False)
    gpu.ask("comer")
    assert (gpu.suspensions, "comer" in gpu.leases) == (["whole"], False)
    gpu.suspended("whole")
    assert "comer" in gpu.leases
    assert 0 < sum(gpu.page_outs.values()) <= 8 * GIB


def test_context_memory_moves_with_a_session_that_is_suspended() -> None:
    gpu = Gpu(context_bytes=GIB)
    gpu.join("a", 7)
    gpu.join("b", 7)
    gpu.ask("a")
    gpu.ask("b")
    assert gpu.leases.keys() == {"a", "b"}
    gpu.tell(gpu.arbiter.device_memory("a", 9 * GIB, 0, gpu.now))
    gpu.until_revoked("b" if "a" not in gpu.revoked else "a")


def test_session_that_cannot_be_suspended_keeps_its_memory_and_others_take_what_is_left() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.tell(gpu.arbiter.device_memory("a", 10 * GIB, 0, gpu.now))
    gpu.join("b", 10)
    gpu.ask("b")
    assert gpu.suspensions == ["a"]
    gpu.suspensions.clear()
    gpu.tell(gpu.arbiter.set_suspendable("a", False, gpu.now))
    gpu.tell(gpu.arbiter.not_suspended("a", gpu.now))
    gpu.tell(gpu.arbiter.remove_session("b", gpu.now))
    gpu.join("c", 5, whole=False)
    gpu.ask("c")
    assert "c" in gpu.leases
    assert gpu.suspensions == []
    assert gpu.arbiter.session_snapshot("a").resident_bytes == 10 * GIB
    gpu.tell(gpu.arbiter.set_suspendable("a", True, gpu.now))
    gpu.join("d", 4)
    gpu.ask("d")
    assert gpu.suspensions == ["a"]


def test_suspended_session_that_does_not_fit_beside_fixed_memory_lets_the_others_work() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.suspend("a")
    gpu.join("fixed", 8, whole=False)
    gpu.tell(gpu.arbiter.memory("fixed", 0, 8 * GIB, gpu.now))
    gpu.tell(gpu.arbiter.device_memory("fixed", 8 * GIB, 0, gpu.now))
    gpu.ask("a")
    assert gpu.leases == {}
    gpu.sizes["fixed"] = (0, 8 * GIB)
    gpu.ask("fixed")
    assert gpu.leases.keys() == {"fixed"}
    gpu.tell(gpu.arbiter.disconnect("fixed", gpu.now))
    assert "a" in gpu.leases


def test_resumption_short_of_memory_frees_more_and_is_tried_again() -> None:
    gpu = Gpu()
    gpu.join("a", 8)
    gpu.use("a")
    gpu.suspend("a")
    gpu.join("b", 7)
    gpu.use("b")
    gpu.ask("a")
    assert gpu.leases.keys() == {"a"}
    assert gpu.suspensions == []
    gpu.tell(gpu.arbiter.short_of_memory("a", 2 * GIB, gpu.now))
    assert gpu.suspensions == ["b"]
    gpu.tell(gpu.arbiter.short_of_memory("a", 2 * GIB, gpu.now))
    gpu.suspended("b")
    gpu.leases.clear()
    gpu.tell(gpu.arbiter.not_resumed("a", 0.5, gpu.now))
    assert gpu.leases == {}
    gpu.now += 0.6
    gpu.tell(gpu.arbiter.tick(gpu.now))
    assert gpu.leases.keys() == {"a"}
    gpu.tell(gpu.arbiter.resumed("a", 8 * GIB, 1.0, gpu.now))
    assert gpu.arbiter.session_snapshot("a").held


def test_others_work_while_a_failed_resumption_waits_for_its_next_try() -> None:
    gpu = Gpu()
    gpu.join("a", 8)
    gpu.use("a")
    gpu.suspend("a")
    gpu.ask("a")
    gpu.tell(gpu.arbiter.not_resumed("a", 5.0, gpu.now))
    gpu.leases.clear()
    gpu.join("b", 16)
    gpu.ask("b")
    assert gpu.leases.keys() == {"b"}
    due = gpu.arbiter.next_wakeup()
    assert due is not None
    assert due <= gpu.now + 5.0


def test_managed_pages_leave_where_a_resumption_finds_too_little_memory() -> None:
    gpu = Gpu()
    gpu.join("a", 8)
    gpu.use("a")
    gpu.suspend("a")
    gpu.join("m", 6, whole=False)
    gpu.use("m")
    gpu.ask("a")
    assert gpu.page_outs == {}
    gpu.tell(gpu.arbiter.short_of_memory("a", GIB, gpu.now))
    assert gpu.page_outs == {"m": GIB}
    assert gpu.leases.keys() == {"a"}


def test_session_is_not_granted_between_the_order_and_its_suspension() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.join("b", 10)
    gpu.ask("b")
    gpu.tell(gpu.arbiter.disconnect("b", gpu.now))
    gpu.ask("a")
    assert gpu.leases == {}
    gpu.suspended("a")
    assert gpu.leases.keys() == {"a"}


def test_session_that_was_suspended_before_the_agent_began_comes_back() -> None:
    gpu = Gpu()
    gpu.tell(gpu.arbiter.add_session("a", 25, gpu.now, suspends=True, suspended=True))
    gpu.join("a", 10, session="a")
    assert gpu.arbiter.session_snapshot("a").resident_bytes == 0
    gpu.ask("a")
    assert gpu.leases.keys() == {"a"}


def test_suspended_session_comes_back_though_its_new_processes_have_no_place_beside_it() -> None:
    """They connect while it is away, and each can need a CUDA context."""
    gpu = Gpu(context_bytes=GIB)
    gpu.join("large", 15)
    gpu.use("large")
    gpu.tell(gpu.arbiter.set_weight("large", 0, gpu.now))
    assert gpu.suspensions == ["large"]
    gpu.tell(gpu.arbiter.suspended("large", 16 * GIB, 1.0, gpu.now))
    for name in ("second", "third"):
        gpu.join(name, 0, session="large")
    gpu.ask("large")
    assert gpu.leases.keys() == {"large"}
