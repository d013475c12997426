"""Whether a node takes the pod that was placed on it: noticed at once, or once the scheduler's refusal lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION, Ended, annotation, ended_by_node
from gpushare_spawner.spawner.kubernetes.unschedulable import LASTS, UNSCHEDULABLE, Cause, Unschedulable, unschedulable
from gpushare_spawner.wording.spawn.scheduler import cannot_start, missing, not_taken

NOT_PREPARED = "FailedPrepareDynamicResources"
"""Reason of the event by which the kubelet says that a claim of the pod could not be prepared. It tries again, after 15
to 65 s."""
BY_AGENT = "gpushare: "
"""Begins what the agent says in that event; otherwise the agent is not there, and comes."""


class NotAdmitted(Exception):
    """A pod did not get onto its node. ``str()`` is a sentence for people, without a full stop."""

    def __init__(
        self, sentence: str, missing: str, *, distrust: bool, elsewhere: bool = True, detail: str = ""
    ) -> None:
        super().__init__(sentence)
        self.missing = missing
        """What is missing on the node, as half a sentence."""
        self.distrust = distrust
        """Whether what the agent reports of the node is doubtful for everybody."""
        self.elsewhere = elsewhere
        """Whether another node can help."""
        self.detail = detail
        """The cluster's own words, for the log."""

    @classmethod
    def ended(cls, ended: Ended) -> NotAdmitted:
        """The kubelet refused it."""
        return cls(str(ended), ended.what, distrust=True)

    @classmethod
    def unschedulable(cls, node: str, found: Unschedulable) -> NotAdmitted:
        """The scheduler found no way to put it there, for some time."""
        what = missing(found.reasons)
        sentence = not_taken(node, what) if found.concerns_node else cannot_start(what)
        return cls(
            sentence,
            what,
            distrust=Cause.UNITS in found.causes,
            elsewhere=found.concerns_node,
            detail=f"{UNSCHEDULABLE}: {found.said}",
        )


class Admission:
    """One try to get a pod onto its node. ``token`` is the annotation of the pod that is meant.

    ``scaling`` says whether a node is being added for the pod: nothing counts against the node then. ``events`` returns
    those about pods of that name.
    """

    def __init__(
        self,
        token: str,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        scaling: Callable[[], bool] = lambda: False,
        events: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    ) -> None:
        self._token = token
        self._node = node
        self._clock = clock
        self._scaling = scaling
        self._events = events
        self._seen: Any = None
        self._found: Unschedulable | None = None
        self._since: dict[Cause, float] = {}

    def runs(self, pod: Mapping[str, Any] | None, runs: Callable[[Any], bool]) -> bool:
        """Return whether the pod runs, by ``runs``. Raises NotAdmitted where its node does not take it.

        A pod that stays unschedulable for longer than `LASTS` says is not admitted either: what the hub knows of the
        node and what the scheduler knows differ, or the hub does not look at what is missing.
        """
        if pod is not None and pod is self._seen and self._found is None:
            # asked for again and again, and the same until the watch brings another
            self._check_prepared(pod)
            return False
        if runs(pod):
            return True
        if pod is None:
            return False
        if pod is not self._seen:
            self._look_at(pod)
        if self._found is not None and self._lasts():
            raise NotAdmitted.unschedulable(self._node, self._found)
        return False

    def _look_at(self, pod: Mapping[str, Any]) -> None:
        self._seen = pod
        ours = annotation(pod, RESERVATION) == self._token
        ended = ended_by_node(pod) if ours else None
        if ended is not None:
            raise NotAdmitted.ended(ended)
        self._found = unschedulable(pod) if ours else None
        causes = self._found.causes if self._found is not None else frozenset()
        # a reason of another kind begins anew; other figures in the message do not
        self._since = {cause: self._since.get(cause, self._clock()) for cause in causes}

    def _check_prepared(self, pod: Mapping[str, Any]) -> None:
        """Raises NotAdmitted where the agent cannot give the pod what its claim has."""
        if not pod["spec"].get("resourceClaims"):
            return
        for event in self._events():
            said = str(event.get("message") or "")
            if (
                event.get("reason") == NOT_PREPARED
                and BY_AGENT in said
                and event["involvedObject"].get("uid") == pod["metadata"]["uid"]
            ):
                words = said.partition(BY_AGENT)[2].strip()
                raise NotAdmitted.ended(Ended(NOT_PREPARED, words, self._node))

    def _lasts(self) -> bool:
        now = self._clock()
        if self._scaling():
            self._since = dict.fromkeys(self._since, now)
        return any(now - since >= LASTS[cause] for cause, since in self._since.items())
