"""How objects go: at once, with grace, or when their finalizers have been removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from .errors import conflict
from .kinds import KINDS, NAMESPACES, PODS, Kind
from .store import Event, Store, Stored


def timestamp(when: datetime | None = None) -> str:
    """RFC 3339, whole seconds."""
    return (when or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def delete(store: Store, kind: Kind, stored: Stored, options: dict[str, Any]) -> tuple[Stored, bool]:
    """(the object's last or present state, whether it is gone). Raises ApiError 409 when a precondition fails."""
    check_preconditions(kind, stored, options.get("preconditions") or {})
    grace = _grace(kind, stored.item, options)
    finalizers = stored.item["metadata"].get("finalizers") or []
    if grace == 0 and not finalizers:
        return store.remove(kind, stored.key), True
    metadata = stored.item["metadata"]
    going = metadata.get("deletionTimestamp")
    if going and (metadata.get("deletionGracePeriodSeconds") or 0) <= grace:
        return stored, False  # a grace period can only be shortened
    item = stored.copy()
    item["metadata"]["deletionTimestamp"] = timestamp(datetime.now(UTC) + timedelta(seconds=grace))
    item["metadata"]["deletionGracePeriodSeconds"] = grace
    if kind is NAMESPACES:
        item["status"] = {"phase": "Terminating"}
    return store.put(kind, item), False


def is_finished(item: dict[str, Any]) -> bool:
    """Whether nothing holds an object back any more that is being deleted."""
    metadata = item["metadata"]
    return (
        bool(metadata.get("deletionTimestamp"))
        and not metadata.get("finalizers")
        and not metadata.get("deletionGracePeriodSeconds")
    )


def collect_garbage(store: Store, kind: Kind, event: Event) -> None:
    """Delete what an object owned, and a namespace's contents (what a cluster's controllers do)."""
    if not event.deleted:
        if kind is NAMESPACES and event.after.item["metadata"].get("deletionTimestamp"):
            _empty_namespace(store, event.after)
        return
    uid = event.after.item["metadata"]["uid"]
    for other, key in store.owned_by(uid):
        stored = store.get(other, key)
        if stored is not None and len(stored.item["metadata"]["ownerReferences"]) == 1:
            delete(store, other, stored, {})
    _end_namespace(store, event.after.key[0])


def _empty_namespace(store: Store, namespace: Stored) -> None:
    name = namespace.item["metadata"]["name"]
    for kind in KINDS:
        if kind.namespaced:
            for stored in list(store.items(kind, name)):
                if store.get(kind, stored.key) is not None:
                    delete(store, kind, stored, {})
    _end_namespace(store, name)


def _end_namespace(store: Store, name: str) -> None:
    """A namespace that is being deleted ends with the last of its contents."""
    namespace = store.get(NAMESPACES, ("", name)) if name else None
    if namespace is None or not namespace.item["metadata"].get("deletionTimestamp"):
        return
    if not any(True for kind in KINDS if kind.namespaced for _ in store.items(kind, name)):
        store.remove(NAMESPACES, ("", name))


def check_preconditions(kind: Kind, stored: Stored, preconditions: dict[str, Any]) -> None:
    """Raises ApiError 409."""
    metadata = stored.item["metadata"]
    for field in ("uid", "resourceVersion"):
        wanted = preconditions.get(field)
        if wanted and wanted != metadata[field]:
            said, why = (
                ("UID", "The object might have been deleted and then recreated")
                if field == "uid"
                else ("ResourceVersion", "The object might have been modified")
            )
            record = f"the {said} in record ({metadata[field]})"
            message = f"the {said} in the precondition ({wanted}) does not match {record}. {why}"
            raise conflict(kind.kind, metadata["name"], message, kind.group)


def _grace(kind: Kind, item: dict[str, Any], options: dict[str, Any]) -> int:
    if kind is NAMESPACES:
        return 1  # it ends when it is empty
    if kind is not PODS:
        return 0
    if not item["spec"].get("nodeName") or (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    asked = options.get("gracePeriodSeconds")
    return int(item["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked)
