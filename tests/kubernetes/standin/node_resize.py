"""The kubelet's side of pods/resize: what a node has granted to its pods, and the resizes that wait for it.

As measured on Kubernetes 1.36.2. What it does not know: memory limits below what a container uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from .devices import AdmissionError
from .quantities import is_extended, quantity
from .resize import RESIZABLE, quality
from .scheduler import now, requests

if TYPE_CHECKING:
    from .pod_worker import PodWorker

CONDITIONS = ("PodResizePending", "PodResizeInProgress")
_CLASSES = ("Guaranteed", "Burstable", "BestEffort")
Resources = dict[str, dict[str, Any]]
"""By container: its requests and limits."""


@dataclass
class Granted:
    """The resources of a pod's containers, as its node has them."""

    allocated: Resources
    """What the node has agreed to. It counts for the pods that come later."""
    in_force: Resources
    """What the containers run with."""
    waits: tuple[str, str] | None = None
    """Why the node has not agreed to the pod's spec: reason and message."""
    waits_since: float = field(default=0.0)

    @classmethod
    def of(cls, pod: dict[str, Any]) -> Granted:
        """For a pod that is admitted."""
        return cls(resources_of(pod), resources_of(pod))

    def conditions(self) -> list[dict[str, str]]:
        """Of the pod's status."""
        at = {"status": "True", "lastTransitionTime": now()}
        found = []
        if self.waits is not None:
            found.append({"type": "PodResizePending", **at, "reason": self.waits[0], "message": self.waits[1]})
        if self.allocated != self.in_force:
            found.append({"type": "PodResizeInProgress", **at})
        return found

    def asks(self, pod: dict[str, Any]) -> dict[str, Decimal]:
        """What the pod takes of its node: what is allocated to it, not what its spec wishes."""
        return requests(_with(pod, self.allocated))


class Resizes:
    """Run `run` in a task. `wake` after every change of a pod here, and after its end."""

    def __init__(
        self,
        workers: Callable[[], Iterable[PodWorker]],
        check: Callable[[PodWorker, dict[str, Any]], None],
        lock: asyncio.Lock,
        retry_after: float,
        takes: float,
    ) -> None:
        """``check`` raises AdmissionError where the node cannot grant a pod's new resources now; `BeyondNode` where it
        never can. ``retry_after``: seconds; ``takes``: seconds until a granted resize is in force."""
        self._workers = workers
        self._check = check
        self._lock = lock
        self._retry_after = retry_after
        self._takes = takes
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        while True:
            waiting = self._in_order()
            if not waiting or all(worker.granted.waits is not None for worker in waiting):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._retry_after if waiting else None):
                        await self._woken.wait()
            self._woken.clear()
            for worker in self._in_order():
                await self._try(worker)

    def _in_order(self) -> list[PodWorker]:
        """The pods whose spec asks for other resources than they have: less comes first."""
        changed = [
            worker
            for worker in self._workers()
            if worker.is_running
            and not worker.pod["metadata"].get("deletionTimestamp")
            and resources_of(worker.pod) != worker.granted.allocated
        ]
        return sorted(
            changed,
            key=lambda worker: (
                _grows(worker),
                -int(worker.pod["spec"].get("priority") or 0),
                _CLASSES.index(quality(worker.pod["spec"])),
                worker.granted.waits_since,
            ),
        )

    async def _try(self, worker: PodWorker) -> None:
        granted, wanted = worker.granted, resources_of(worker.pod)
        was = granted.waits
        async with self._lock:
            try:
                self._check(worker, _with(worker.pod, wanted))
            except AdmissionError as error:
                reason = "Infeasible" if isinstance(error, BeyondNode) else "Deferred"
                granted.waits = reason, str(error).removeprefix("Pod was rejected: ")
                granted.waits_since = granted.waits_since or asyncio.get_running_loop().time()
            else:
                granted.allocated, granted.waits, granted.waits_since = wanted, None, 0.0
        if granted.waits is not None:
            if granted.waits != was:
                await worker.write_again()
            return
        await worker.write_again()
        await asyncio.sleep(self._takes)
        granted.in_force = copy.deepcopy(wanted)
        await worker.write_again()
        self.wake()


class BeyondNode(AdmissionError):
    """The whole node has less than a pod asks for."""


def check_free(wanted: dict[str, Decimal], used: list[dict[str, Decimal]], capacity: dict[str, str]) -> None:
    """Whether a node has the CPU, the memory and the number of pods. Devices are counted by their ids, not here.

    Raises AdmissionError, its reason OutOf and the resource.
    """
    for name, amount in wanted.items():
        if is_extended(name) or name not in capacity:
            continue
        most, others = quantity(capacity[name]), sum((each.get(name, Decimal(0)) for each in used), Decimal(0))
        asked, taken, whole = (_counted(name, value) for value in (amount, others, most))
        if amount > most:
            why = f"Node didn't have enough capacity: {name}, requested: {asked}, capacity: {whole}"
            raise BeyondNode(f"OutOf{name}", f"Pod was rejected: {why}")
        if others + amount > most:
            why = f"Node didn't have enough resource: {name}, requested: {asked}, used: {taken}, capacity: {whole}"
            raise AdmissionError(f"OutOf{name}", f"Pod was rejected: {why}")


def resources_of(pod: dict[str, Any]) -> Resources:
    """A copy of what the spec of a pod asks for."""
    return {each["name"]: copy.deepcopy(each.get("resources") or {}) for each in pod["spec"]["containers"]}


def _with(pod: dict[str, Any], resources: Resources) -> dict[str, Any]:
    """The pod as if its spec said this, without what its status says."""
    containers = [{**each, "resources": resources[each["name"]]} for each in pod["spec"]["containers"]]
    return {**pod, "spec": {**pod["spec"], "containers": containers}, "status": {}}


def _grows(worker: PodWorker) -> bool:
    asked, has = requests({**worker.pod, "status": {}}), worker.granted.asks(worker.pod)
    return any(asked.get(name, Decimal(0)) > has.get(name, Decimal(0)) for name in RESIZABLE)


def _counted(name: str, amount: Decimal) -> int:
    """As a kubelet writes it: CPU in thousandths."""
    return int(amount * 1000 if name == "cpu" else amount)
