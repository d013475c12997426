"""A session's record, from its pod."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, PodKey
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod
from gpushare_spawner.agent.state.session_record import PodOwner, SessionRecord
from gpushare_spawner.model.kubernetes import PodSession
from gpushare_spawner.model.protocol.control import OpenRequest
from gpushare_spawner.model.session_id import split_session_id
from gpushare_spawner.model.share import UNITS_PER_GPU

FOREIGN_TEMPLATE = "none"
"""Of a pod that nobody made from a template."""
MAX_SESSION_ID = 200
"""Characters."""


def pod_record(pod: Pod, said: PodSession, devices: Mapping[str, Given], seen: tuple[str, ...]) -> SessionRecord:
    """A session as its pod's annotations have it, tier and all. Raises pydantic.ValidationError.

    `devices`: ids by GPU and container; they, not the annotations, say which GPUs it is on. `seen`: see
    `PodOwner.seen`.
    """
    user, server = split_session_id(said.session)
    return SessionRecord(
        request=OpenRequest(
            id=said.session,
            user=user,
            server=server,
            uid=0,
            template=said.template,
            quota=said.quota,
            user_units=said.user_units,
            gpus=_in_order(said, devices),
            share_units=said.share_units,
            borrowed_units=said.borrowed_units,
            memory_limit=said.memory_limit,
            oversubscribe=said.oversubscribe,
            engine=said.engine,
        ),
        opened_at=pod.created,
        borrowed_units=said.borrowed_units,
        effective_units=said.effective_units,
        tier=said.tier,
        tier_since=said.tier_since,
        use=said.use,
        notice=said.notice,
        yields_until=said.yields_until,
        controls=said.controls,
        messages=said.messages,
        pod=PodOwner(
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            devices=ids_by_gpu(devices),
            given=grants_of(devices),
            seen=seen,
            placed_units=said.placed_units,
            resized=said.resized,
        ),
    )


def foreign_record(
    key: PodKey, devices: Mapping[str, Given], unit_size: int, now: float, uid: str = ""
) -> SessionRecord:
    """A pod that holds devices without being the hub's: it has what it holds, and stays active.

    `now`: seconds since the epoch.
    """
    namespace, name = key
    held = ids_by_gpu(devices)
    share = min(UNITS_PER_GPU, max(map(len, held.values())) * unit_size)
    request = OpenRequest(
        id=_foreign_id(key),
        user=f"{namespace}/{name}",
        uid=0,
        template=FOREIGN_TEMPLATE,
        gpus=tuple(devices),
        share_units=share,
    )
    record = SessionRecord.opened(request, now)
    record.pod = PodOwner(namespace=namespace, name=name, uid=uid, devices=held, given=grants_of(devices))
    return record


def _foreign_id(key: PodKey) -> str:
    id = f"pod:{key[0]}:{key[1]}"
    if len(id) <= MAX_SESSION_ID:
        return id
    digest = hashlib.sha256(id.encode()).hexdigest()[:16]
    return f"{id[: MAX_SESSION_ID - len(digest) - 1]}:{digest}"


def ids_by_gpu(devices: Mapping[str, Given]) -> dict[str, tuple[str, ...]]:
    """All ids of each GPU, whichever container has them."""
    return {gpu: tuple(sorted(frozenset().union(*given))) for gpu, given in devices.items()}


def grants_of(devices: Mapping[str, Given]) -> tuple[tuple[str, ...], ...]:
    """The ids that were given together, for `PodOwner.given`."""
    return tuple(sorted(tuple(sorted(ids)) for given in devices.values() for ids in given))


def _in_order(said: PodSession, devices: Mapping[str, Given]) -> tuple[str, ...]:
    return said.gpus if set(said.gpus) == set(devices) else tuple(devices)
