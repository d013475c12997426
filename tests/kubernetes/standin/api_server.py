"""The stand-in API server: the Kubernetes API over plain HTTP on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import secrets
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from aiohttp import web

from . import admission, defaults, deletion, immutable, patches, quotas, resize, resource_claims, validation
from .access import MASTERS, Access, Ask, User
from .admission import Write
from .answers import fail, json_answer, raw_answer
from .deletion import timestamp
from .errors import (
    ApiError,
    Undecodable,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    modified,
    no_method,
    no_resource,
    not_found,
)
from .faults import Faults
from .kinds import (
    CONFIG_MAPS,
    KINDS,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    PRIORITY_CLASSES,
    RESOURCE_GROUP,
    SERVICE_ACCOUNTS,
    Kind,
)
from .names import quoted
from .selectors import selector
from .store import Store, Stored
from .targets import REVIEWS, Target, ask_of, target_of, whole_number
from .watching import Watching

# no vowels, so that no words come out
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0+standin", "platform": "linux/amd64"}
CORE = "/api/v1"
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
ISSUER = "https://kubernetes.default.svc"
_SERVER_FIELDS = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")


class StandInApiServer:
    """Start with ``async with``. `url` and `admin_token` are what a client needs."""

    def __init__(self, faults: Faults | None = None, port: int = 0, bookmark_interval: float = 60.0) -> None:
        self.faults = faults or Faults()
        self.in_place_resize = True
        """Whether it has pods/resize, as Kubernetes 1.33 and later."""
        self.refuses_infeasible_resizes = True
        """Whether it refuses a resize beyond the node, as Kubernetes 1.36 and later."""
        self.gates: set[str] | None = set(resource_claims.GATES)
        """Feature gates of resource.k8s.io/v1 that are on; None: it has no such API, as before Kubernetes 1.34."""
        self.store = Store()
        self.faults.on_cut = self.store.cut_watches
        self.access = Access(self.store)
        self.admin_token = self.access.add_user("admin", MASTERS)
        self.calls: Counter[tuple[str, str]] = Counter()
        """How often each (verb, resource) was asked for."""
        self.pod_webhooks: list[Callable[[dict[str, Any]], None]] = []
        """Called with each pod that is created, to change it or to refuse it with ApiError."""
        self._port = port
        self._watching = Watching(self.store, bookmark_interval)
        self._continues: dict[str, tuple[int, list[Stored]]] = {}
        self._issued: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.store.on_change(partial(deletion.collect_garbage, self.store))
        self.store.on_change(partial(resource_claims.release, self.store))
        for namespace in ("default", "kube-system"):
            self._create(Target(NAMESPACES, "", "", ""), {"metadata": {"name": namespace}}, {})

    async def __aenter__(self) -> StandInApiServer:
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.store.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    def set_bookmark_interval(self, seconds: float) -> None:
        """For watches that begin from now on."""
        self._watching.bookmark_interval = seconds

    def compact(self) -> None:
        """Forget the past: watches from an earlier version and unfinished lists get 410."""
        self.store.forget_history()
        self._continues.clear()

    # a request, from its path to its answer

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            user = self.access.user(request.headers.get("Authorization"))
            target = target_of(request.path)
            ask = ask_of(request, target, user=user.name)
            if ask.resource != REVIEWS.plural:
                self.calls[ask.verb, ask.resource] += 1
            await self.faults.delay()
            fault = self.faults.draw(ask)
            if fault not in (None, "lost"):
                return fail(request, fault)
            if self.gates is None and ask.group == RESOURCE_GROUP:
                raise no_resource()
            self.access.check(user, ask)
            if target is None:
                return self._resources() if request.path.rstrip("/") == CORE else _other_path(request.path)
            if ask.verb == "watch":
                matches = selector(target.kind, *_selectors(request))
                if fault == "lost":
                    return fail(request, "reset")
                return await self._watching.answer(request, target.kind, target.namespace, matches)
            answer = await self._answer(request, target, user)
            self.faults.on_done(ask)
            return fail(request, "reset") if fault == "lost" else answer
        except ApiError as error:
            return json_answer(error.status(), error.code)

    async def _answer(self, request: web.Request, target: Target, user: User) -> web.Response:
        if request.method == "GET":
            return self._list(request, target) if not target.name else raw_answer(self._found(target).raw)
        body = await _body(request)
        if request.method == "DELETE":
            return self._delete(request, target, body, user)
        if request.method == "POST":
            if target.kind is SERVICE_ACCOUNTS and target.subresource == "token":
                return self._make_token(target, body)
            if target.kind is PODS and target.subresource == "binding":
                return self._bind(target, body, user)
            if target.name:
                raise no_method()
            if target.kind is REVIEWS:
                return json_answer(self._review(user, body), 201)
            return raw_answer(self._create(target, body, request.query, user).raw, 201)
        if request.method in ("PUT", "PATCH") and target.name:
            return raw_answer(self._update(request, target, body, user).raw)
        raise no_method()

    def _resources(self) -> web.Response:
        """What the core group has, for discovery."""
        found = [
            {"name": kind.plural, "singularName": "", "namespaced": kind.namespaced, "kind": kind.kind, "verbs": VERBS}
            for kind in KINDS
            if not kind.group
        ]
        if self.in_place_resize:
            verbs = ["get", "patch", "update"]
            found.append({**found[0], "name": "pods/resize", "namespaced": True, "kind": "Pod", "verbs": verbs})
        return json_answer({"kind": "APIResourceList", "groupVersion": "v1", "resources": found})

    def _found(self, target: Target) -> Stored:
        stored = self.store.get(target.kind, (target.namespace, target.name))
        if stored is None:
            raise not_found(target.kind.plural, target.name, target.kind.group)
        return stored

    # verbs

    def _list(self, request: web.Request, target: Target) -> web.Response:
        kind, query = target.kind, request.query
        matches = selector(kind, *_selectors(request))
        limit = whole_number(query, "limit")
        if token := query.get("continue"):
            if token not in self._issued:
                raise bad_request("invalid continue token: continue key is not valid")
            if token not in self._continues:
                message = "The provided continue parameter is too old to display a consistent list result."
                raise ApiError(410, "Expired", message)
            version, chosen = self._continues.pop(token)
        else:
            version = self._list_version(kind, query.get("resourceVersion", ""), query.get("resourceVersionMatch", ""))
            known = self.store.items(kind) if version == self.store.version else self.store.as_of(kind, version)
            chosen = [
                stored
                for stored in known
                if (not target.namespace or stored.key[0] == target.namespace) and matches(stored.item)
            ]
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        if limit and len(chosen) > limit:
            token = secrets.token_urlsafe(12)
            self._continues[token] = version, chosen[limit:]
            self._issued.add(token)
            metadata |= {"continue": token, "remainingItemCount": len(chosen) - limit}
            chosen = chosen[:limit]
        head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata}
        items = b",".join(stored.raw for stored in chosen)
        return raw_answer(json.dumps(head).encode()[:-1] + b',"items":[' + items + b"]}")

    def _list_version(self, kind: Kind, asked: str, match: str) -> int:
        if match and not asked:
            why = "resourceVersionMatch is forbidden unless resourceVersion is provided"
            raise _invalid_options("resourceVersionMatch", f"Forbidden: {why}")
        if match not in ("", "Exact", "NotOlderThan"):
            supported = 'supported values: "Exact", "NotOlderThan", ""'
            raise _invalid_options("resourceVersionMatch", f"Unsupported value: {quoted(match)}: {supported}")
        if not asked:
            return self.store.version
        if not asked.isdigit():
            raise bad_request(f"invalid resource version {asked!r}")
        version = int(asked)
        if version == 0:
            if match == "Exact":
                why = 'resourceVersionMatch "exact" is forbidden for resourceVersion "0"'
                raise _invalid_options("resourceVersionMatch", f"Forbidden: {why}")
            return self._stale_version(kind)
        if version > self.store.version:
            message = f"Timeout: Too large resource version: {version}, current: {self.store.version}"
            cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            raise ApiError(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})
        return version if match == "Exact" else self.store.version

    def _stale_version(self, kind: Kind) -> int:
        """What a list gets that accepts any version."""
        stale = self.faults.stale_at
        if stale is not None:
            with contextlib.suppress(ApiError):
                self.store.since(kind, stale)
                return stale
        return self.store.version

    def _create(self, target: Target, item: dict[str, Any], query: Any, user: User | None = None) -> Stored:
        """Without a user by the server itself."""
        kind = target.kind
        metadata = item.setdefault("metadata", {})
        given_kind, given_version = item.get("kind"), item.get("apiVersion")
        if given_kind not in (None, kind.kind) or given_version not in (None, kind.api_version):
            raise bad_request(
                f"the object provided is a {given_version} {given_kind}, not {kind.api_version} {kind.kind}"
            )
        item["kind"], item["apiVersion"] = kind.kind, kind.api_version
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + "".join(secrets.choice(_SUFFIX) for _ in range(5))
        if metadata.get("resourceVersion"):
            raise ApiError(500, "InternalError", "resourceVersion should not be set on objects to be created")
        if kind.namespaced:
            self._check_namespace(target, metadata)
        for name in _SERVER_FIELDS:
            metadata.pop(name, None)
        if kind is PODS:
            for webhook in self.pod_webhooks:
                webhook(item)
            quotas.fill_in(self.store, item)
        defaults.fill_in(kind, item)
        validation.check(kind, item)
        resource_claims.keep(kind, item, self.gates or ())
        resource_claims.check(kind, item)
        if kind is PODS:
            self._check_priority_class(item)
        elif kind is POLICIES:
            admission.check_policy(item)
        key = metadata.get("namespace", ""), metadata["name"]
        if self.store.get(kind, key) is not None:
            raise already_exists(kind.plural, metadata["name"], kind.group)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
        if kind.has_status:
            item["status"] = _first_status(kind, item)
        validation.check_size(json.dumps(item).encode())
        if user is not None:
            write = Write(user, "CREATE", kind, metadata.get("namespace", ""), metadata["name"])
            admission.admit(self.store, write, None, item)
        if kind is PODS:
            quotas.check(self.store, item)
        if query.get("dryRun"):
            metadata["resourceVersion"] = str(self.store.version)
            return Stored(item)
        stored = self.store.put(kind, item)
        if kind is NAMESPACES:
            self._furnish_namespace(metadata["name"])
        return stored

    def _check_priority_class(self, pod: dict[str, Any]) -> None:
        name = pod["spec"].get("priorityClassName")
        if name and self.store.get(PRIORITY_CLASSES, ("", name)) is None and not name.startswith("system-"):
            why = f"no PriorityClass with name {name} was found"
            raise forbidden(f'pods "{pod["metadata"]["name"]}" is forbidden: {why}')

    def _furnish_namespace(self, namespace: str) -> None:
        """What a cluster's controllers put into every new namespace."""
        self._create(Target(SERVICE_ACCOUNTS, namespace, "", ""), {"metadata": {"name": "default"}}, {})
        authority = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}
        self._create(Target(CONFIG_MAPS, namespace, "", ""), authority, {})

    def _check_namespace(self, target: Target, metadata: dict[str, Any]) -> None:
        if not target.namespace:
            raise no_method()
        if metadata.get("namespace") not in (None, "", target.namespace):
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        metadata["namespace"] = target.namespace
        namespace = self.store.get(NAMESPACES, ("", target.namespace))
        if namespace is None:
            raise not_found("namespaces", target.namespace)
        if namespace.item["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {target.namespace} because it is being terminated"
            raise forbidden(f'{target.kind.plural} "{metadata.get("name")}" is forbidden: {why}')

    def _update(self, request: web.Request, target: Target, body: Any, user: User) -> Stored:
        kind = target.kind
        if target.subresource == "resize":
            if kind is not PODS or not self.in_place_resize:
                raise no_resource()
        elif target.subresource not in ("", "status") or (target.subresource == "status" and not kind.has_status):
            raise no_resource()
        stored = self._found(target)
        before = stored.item
        changed = body if request.method == "PUT" else _patched(request.content_type, stored, body, kind)
        if not isinstance(changed, dict) or not isinstance(changed.get("metadata"), dict):
            raise bad_request("the object has no metadata")
        if request.method == "PATCH" and (changed.get("kind"), changed.get("apiVersion")) != (
            kind.kind,
            kind.api_version,
        ):
            raise validation.wrong_patch(changed, "the kind of the object is another")
        metadata = changed["metadata"]
        if request.method == "PUT" and metadata.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            uids = metadata["uid"], before["metadata"]["uid"]
            why = f"Precondition failed: UID in precondition: {uids[0]}, UID in object meta: {uids[1]}"
            raise conflict(kind.plural, target.name, why, kind.group)
        immutable.check_identity(kind, target.name, before, changed)
        version = metadata.get("resourceVersion")
        if version and version != before["metadata"]["resourceVersion"]:
            raise modified(kind.plural, target.name, kind.group)
        after = _allowed_change(kind, target.subresource, before, changed)
        try:
            defaults.fill_in(kind, after)
            validation.check(kind, after)
        except Undecodable as error:
            if request.method == "PUT":
                raise
            raise validation.wrong_patch(after, error.why) from None
        if not target.subresource:
            resource_claims.keep(kind, after, self.gates or ())
            resource_claims.check(kind, after)
            resource_claims.check_update(kind, before, after)
            immutable.check_update(kind, before, after)
        elif target.subresource == "resize":
            resize.check_quality(target.name, resize.quality(before["spec"]), resize.quality(after["spec"]))
        validation.check_size(json.dumps(after).encode())
        admission.admit(self.store, _write(user, "UPDATE", target), before, after)
        if target.subresource == "resize":
            quotas.check(self.store, after)
            if self.refuses_infeasible_resizes and after["spec"] != before["spec"]:
                resize.check_node(self.store, after)
        if after == before or request.query.get("dryRun"):
            return Stored(after) if after != before else stored
        if deletion.is_finished(after):
            return self.store.remove(kind, stored.key)
        return self.store.put(kind, after)

    def _delete(self, request: web.Request, target: Target, options: Any, user: User) -> web.Response:
        options = dict(options or {})
        if not request.body_exists:
            # with a body the query's options do not count
            options = {name: request.query[name] for name in ("propagationPolicy", "dryRun") if name in request.query}
            if "gracePeriodSeconds" in request.query:
                options["gracePeriodSeconds"] = whole_number(request.query, "gracePeriodSeconds")
        if options.get("propagationPolicy", "Background") not in ("Foreground", "Background", "Orphan"):
            said = f"Unsupported value: {quoted(options['propagationPolicy'])}"
            supported = 'supported values: "Foreground", "Background", "Orphan", "nil"'
            raise invalid("DeleteOptions", "", [("propagationPolicy", f"{said}: {supported}")], "meta.k8s.io")
        kind = target.kind
        if target.name:
            stored = self._found(target)
            admission.admit(self.store, _write(user, "DELETE", target), stored.item, None)
            if options.get("dryRun"):
                deletion.check_preconditions(kind, stored, options.get("preconditions") or {})
                return raw_answer(stored.raw)
            last, gone = deletion.delete(self.store, kind, stored, options)
            if kind.returns_deleted or not gone:
                return raw_answer(last.raw)
            metadata = last.item["metadata"]
            details = {"name": metadata["name"], "kind": kind.plural, "uid": metadata["uid"]}
            if kind.group:
                details["group"] = kind.group
            return json_answer(
                {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
            )
        matches = selector(kind, *_selectors(request))
        chosen = [stored for stored in self.store.items(kind, target.namespace) if matches(stored.item)]
        for stored in chosen:
            write = Write(user, "DELETE", kind, *stored.key)
            admission.admit(self.store, write, stored.item, None)
        last_states = [deletion.delete(self.store, kind, stored, options)[0].item for stored in chosen]
        metadata = {"resourceVersion": str(self.store.version)}
        return json_answer(
            {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": last_states}
        )

    def _bind(self, target: Target, binding: dict[str, Any], user: User) -> web.Response:
        stored = self._found(target)
        admission.admit(self.store, _write(user, "CREATE", target), None, binding)
        if stored.item["metadata"].get("deletionTimestamp"):
            raise modified("pods/binding", target.name)
        if node := stored.item["spec"].get("nodeName"):
            why = f'pod {target.name} is already assigned to node "{node}"'
            raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on pods/binding "{target.name}": {why}')
        item = stored.copy()
        item["spec"]["nodeName"] = binding["target"]["name"]
        conditions = [c for c in item["status"].get("conditions", []) if c["type"] != "PodScheduled"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
        item["status"]["conditions"] = [*conditions, scheduled]
        self.store.put(PODS, item)
        return json_answer(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
        )

    def _make_token(self, target: Target, request: dict[str, Any]) -> web.Response:
        self._found(target)
        seconds = (request.get("spec") or {}).get("expirationSeconds", 3600)
        if seconds < 600:
            said = f"Invalid value: {seconds}: may not specify a duration less than 10 minutes"
            raise invalid("TokenRequest", "", [("spec.expirationSeconds", said)], "authentication.k8s.io")
        expires = datetime.now(UTC) + timedelta(seconds=seconds)
        bound = (request.get("spec") or {}).get("boundObjectRef") or {}
        node = self._node_of(target.namespace, bound)
        token = self.access.add_service_account_token(target.namespace, target.name, node)
        answer = {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": target.name, "namespace": target.namespace},
            "spec": {"audiences": [ISSUER], "expirationSeconds": seconds, "boundObjectRef": bound or None},
            "status": {"token": token, "expirationTimestamp": timestamp(expires)},
        }
        return json_answer(answer, 201)

    def _node_of(self, namespace: str, bound: dict[str, Any]) -> str:
        """The node that a token names which is bound to this object: a node, or a pod that runs on one."""
        if bound.get("kind") == "Node":
            return self._found(Target(NODES, "", bound["name"], "")).key[1]
        if bound.get("kind") == "Pod":
            pod = self._found(Target(PODS, namespace, bound["name"], "")).item
            return str(pod["spec"].get("nodeName", ""))
        return ""

    def _review(self, user: User, body: dict[str, Any]) -> dict[str, Any]:
        asked = (body.get("spec") or {}).get("resourceAttributes") or {}
        resource = asked.get("resource", "")
        if asked.get("subresource"):
            resource += "/" + asked["subresource"]
        names = {field: asked.get(field, "") for field in ("verb", "group", "namespace", "name")}
        kind = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
        return {**kind, **body, "status": {"allowed": self.access.allows(user, Ask(resource=resource, **names))}}


def _write(user: User, operation: str, target: Target) -> Write:
    return Write(user, operation, target.kind, target.namespace, target.name, target.subresource)


def _selectors(request: web.Request) -> tuple[str, str]:
    return request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise bad_request(f"the object provided is unrecognized (must be of type JSON): {error}") from None
    if not isinstance(body, dict) and request.method != "PATCH":
        raise bad_request("the object provided is unrecognized (must be of type JSON): it is no object")
    return body


def _patched(content_type: str, stored: Stored, body: Any, kind: Kind) -> Any:
    if content_type == "application/json-patch+json":
        return patches.json_patch(stored.copy(), body)
    if content_type == "application/merge-patch+json":
        return patches.merge_patch(stored.copy(), body)
    if content_type == "application/strategic-merge-patch+json":
        return patches.strategic_merge_patch(stored.copy(), body, kind.kind)
    raise ApiError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}")


def _allowed_change(kind: Kind, subresource: str, before: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """What of a change the server takes over: the status only through its subresource, and nothing else there."""
    if subresource == "resize":
        return resize.resized(before, changed)
    if subresource == "status":
        # labels and annotations are written this way too
        after = {
            **json.loads(json.dumps(before)),
            "metadata": changed["metadata"],
            "status": changed.get("status") or {},
        }
    else:
        after = dict(changed)
        if kind.has_status:
            after["status"] = before.get("status", {})
            if kind is NODES and "status" not in before:
                after.pop("status")
    metadata = dict(after["metadata"])
    for name in _SERVER_FIELDS:
        metadata.pop(name, None)
        if name in before["metadata"]:
            metadata[name] = before["metadata"][name]
    metadata |= {"name": before["metadata"]["name"], "resourceVersion": before["metadata"]["resourceVersion"]}
    if kind.namespaced:
        metadata["namespace"] = before["metadata"]["namespace"]
    return {**after, "metadata": metadata, "kind": kind.kind, "apiVersion": kind.api_version}


def _first_status(kind: Kind, item: dict[str, Any]) -> dict[str, Any]:
    if kind is PODS:
        return {"phase": "Pending", "qosClass": resize.quality(item["spec"])}
    if kind is NAMESPACES:
        return {"phase": "Active"}
    if kind.plural == "persistentvolumeclaims":
        return {"phase": "Pending"}
    return item.get("status") or {} if kind is NODES else {}


def _invalid_options(field: str, message: str) -> ApiError:
    return invalid("ListOptions", "", [(field, message)], "meta.k8s.io")


def _other_path(path: str) -> web.Response:
    if path == "/version":
        return json_answer(VERSION)
    if path in ("/healthz", "/readyz", "/livez"):
        return web.Response(text="ok")
    raise no_resource()
