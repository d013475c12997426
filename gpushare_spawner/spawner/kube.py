"""Servers as pods, with shared GPUs."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

try:
    from kubespawner import KubeSpawner
except ImportError as error:
    raise ImportError(
        "GPUShareSpawner needs the package jupyterhub-kubespawner; "
        "install it with: pip install 'gpushare-spawner[kubernetes]'"
    ) from error

from aiohttp import ClientError
from jupyterhub.utils import maybe_future
from kubernetes_asyncio.client.models import V1Pod
from kubernetes_asyncio.client.rest import ApiException
from traitlets import Float, Integer, Unicode, default

from gpushare_spawner.model.kubernetes import TEMPLATE, is_session
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.native_pod import NativePodLayer
from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.form import OTHER, Form
from gpushare_spawner.spawner.kube_manifest import HUB, RESERVATION, annotation, fragment, holds_share, put_back
from gpushare_spawner.spawner.kube_pods import NotAdmitted, ended_by_node, exit_code, orphans, why_waiting
from gpushare_spawner.spawner.kube_profiles import as_entry, cards, check_choices, default_card, marked_default
from gpushare_spawner.spawner.kube_reflectors import Dated, DatedPodReflector, ReportReflector, ViewStale, freshen
from gpushare_spawner.spawner.kube_reservations import PodReservations, PodShare
from gpushare_spawner.spawner.kube_view import PODS, REPORTS, ClusterView
from gpushare_spawner.spawner.profiles import UNLISTED, Profile
from gpushare_spawner.spawner.progress import Story, interleaved
from gpushare_spawner.spawner.refusal import StartRefused
from gpushare_spawner.spawner.validation import Choice

_TEMPLATES = "/etc/gpushare/templates"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_TEMPLATES_FOR = 0.5
"""Seconds for which templates are not looked for again."""

_WITHOUT_GPU = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not see those of its node because its image says "all". (NVIDIA Container
Toolkit, environment variables: void is "as if there were no GPU".)"""

_ORPHANS_EVERY = 60.0
"""Seconds between two looks for pods that nobody owns, at least; such a pod is left alone for its first 120 s."""
_ORPHAN_AGE = 120.0


class GPUShareSpawner(GPUShareBase, KubeSpawner):
    """KubeSpawner with shared GPUs.

    Every setting, hook and profile of KubeSpawner works as ever. Compute templates are offered beside ``profile_list``;
    while there are none, it is KubeSpawner in everything.
    """

    where = "this cluster"
    away = "the cluster's GPUs and pods cannot be looked at"

    reports_namespace = Unicode(
        help="""
        The namespace in which the nodes' agents publish their reports: the hub's own.

        Default: ``$POD_NAMESPACE``, else that of the hub's service account, else ``KubeSpawner.namespace``.
        """,
    ).tag(config=True)

    share_unit_size = Integer(
        1,
        min=1,
        max=100,
        help="""
        How many units of 1 % of a GPU one device of the agents' device plugin stands for; the agents' ``--unit-size``.
        """,
    ).tag(config=True)

    start_attempts = Integer(
        4,
        min=1,
        help="""
        How often a server with a share is tried at most when a node does not admit its pod, or the cluster's API
        fails.

        A node may be given a pod on what it said a moment ago: its GPU went away, or was given to somebody. Each
        attempt looks at the GPUs anew, and leaves the node that refused alone for 10 s. All of them together are part
        of ``Spawner.start_timeout``.
        """,
    ).tag(config=True)

    view_patience = Float(
        20.0,
        min=0,
        help="""
        Seconds that a start waits while what the GPUs hold is not known, before it is refused: the cluster's API does
        not answer, or no agent has published a report within two minutes.
        """,
    ).tag(config=True)

    @default("reports_namespace")
    def _default_reports_namespace(self) -> str:
        if os.environ.get("POD_NAMESPACE"):
            return os.environ["POD_NAMESPACE"]
        if _NAMESPACE_FILE.exists():
            return _NAMESPACE_FILE.read_text().strip()
        # a user's namespace is not the hub's
        return str(self._namespace_default() if self.enable_user_namespaces else self.namespace)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overrides.also = ("pvc_name", "pod_name", "dns_name", "secret_name")
        self._retries = Story()
        self._reservation: PodShare | None = None
        self._settled = False
        """The options were checked and applied before the start, as a hub does it."""
        self._perhaps_created = False
        self._kubespawners_form: Any = None

    # -- what is offered --

    def _templates(self) -> list[Template]:
        if self.templates_dir == _TEMPLATES and not os.path.isdir(_TEMPLATES):
            # nobody asked for templates: nothing to complain about
            return []
        # one start asks for them many times, and a folder may be on a slow disk
        kept: dict[str, Any] = self._shared(("templates now", self.templates_dir), dict)
        now = time.monotonic()
        if now - kept.get("looked", -_TEMPLATES_FOR) >= _TEMPLATES_FOR:
            kept.update(looked=now, templates=super()._templates())
        found: list[Template] = kept["templates"]
        return found

    async def offered(self) -> list[Profile]:
        """The templates' cards, then those of KubeSpawner's ``profile_list``."""
        return self._cards(await self._own_profiles())

    async def _own_profiles(self) -> list[dict[str, Any]]:
        """KubeSpawner's profile_list, whatever form it has."""
        return (await self._own_profiles_and_default())[0]

    async def _own_profiles_and_default(self) -> tuple[list[dict[str, Any]], str | None]:
        entries = self.profile_list
        if callable(entries):
            entries = await maybe_future(entries(self))
        own: list[dict[str, Any]] = self._get_initialized_profile_list(self._sorted_dict_values(entries or []))
        return own, marked_default(entries, own)

    def _cards(self, own: list[dict[str, Any]]) -> list[Profile]:
        offered, clashes = cards(self._templates(), own)
        for name in clashes:
            self._shared(("clash", name), functools.partial(self._tell_clash, name))
        return offered

    def _tell_clash(self, name: str) -> bool:
        self.log.error("The template %r is not offered: profile_list has a profile with that slug", name)
        return True

    @property
    def reservations(self) -> PodReservations:
        """The shares in flight and the line, one for all spawners of the hub."""
        return self._shared(("cluster", self.reports_namespace), self._new_reservations)

    def _new_reservations(self) -> PodReservations:
        cluster = ClusterView(self.reflectors, self._reports_key, self.share_unit_size, self.log)
        return PodReservations(cluster, self.log, patience=self.view_patience, **self._line_settings())

    @property
    def _reports_key(self) -> tuple[str, str]:
        return (REPORTS, self.reports_namespace)

    # -- reflectors --

    async def _start_reflector(self, kind: str, reflector_class: Any, replace: bool = False, **kwargs: Any) -> Any:
        """As KubeSpawner does. Where there are templates, a reflector that has died is brought back to life."""
        if not self._templates():
            return await super()._start_reflector(kind, reflector_class, replace, **kwargs)
        known = self.reflectors.get(self._get_reflector_key(kind))
        if kind == PODS:
            reflector_class = DatedPodReflector
            # one from before there were templates does not say how fresh it is
            replace = replace or (known is not None and not isinstance(known, Dated))
        if known is not None and not replace:
            if known.watch_task is None or known.watch_task.done():
                await freshen(known)
            return known
        starting = asyncio.ensure_future(super()._start_reflector(kind, reflector_class, replace, **kwargs))
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # a start that is called off must not leave the others waiting for a first list that never comes
        return await asyncio.shield(starting)

    async def _watch(self) -> None:
        """See to it that pods and reports are watched; the waiting room checks that they are watched well."""
        if self._reports_key not in self.reflectors:
            self.reflectors[self._reports_key] = ReportReflector(parent=self, namespace=self.reports_namespace)
        try:
            await self._start_watching_pods()
        except Exception as error:
            self.log.warning("Pods in %s are not watched yet: %s", self.namespace, error)

    # -- the form --

    @default("options_form")
    def _options_form_default(self) -> Any:
        self._kubespawners_form = super()._options_form_default()
        return self._kubespawners_form

    async def get_options_form(self) -> Any:
        """KubeSpawner's form, or an admin's ``options_form``; with templates, one that shows all there is."""
        form = self.options_form
        if not self._templates() or form != self._kubespawners_form:
            return await super().get_options_form()
        return await self.show_form()

    async def show_form(self) -> str:
        """The form's HTML, for this user and what is free now."""
        own, own_default = await self._own_profiles_and_default()
        offered = [card for card in self._cards(own) if card.allows(self.user.name, self.group_names)]
        outlook = await self._outlook() if any(card.template and card.template.gpu for card in offered) else None
        standard = default_card(offered, own_default)
        if not self._has_own_form():
            chosen = self._chosen_before()
            if standard is not None and chosen.get("profile") not in [card.slug for card in offered]:
                chosen = {"profile": standard.slug}
            return Form(self.form_template_paths).render(offered, chosen, outlook, self.away)
        by_slug = {entry["slug"]: entry for entry in own}
        entries = [
            as_entry(card, outlook.availability(card.template) if outlook is not None else None)
            if card.template is not None
            else by_slug[card.slug]
            for card in offered
        ]
        for entry in entries:
            entry["default"] = standard is not None and entry["slug"] == standard.slug
        return str(self._render_options_form(entries))

    def _has_own_form(self) -> bool:
        """Whether the admin has replaced KubeSpawner's form by another."""
        return self.profile_form_template != "" or any(
            os.path.exists(os.path.join(path, "form.html")) for path in self.additional_profile_form_template_paths
        )

    async def _outlook(self) -> Any:
        try:
            await asyncio.wait_for(self._watch(), self.form_timeout)
        except TimeoutError:
            self.log.warning("The form is shown without availability: pods are not watched in time")
            return None
        return await super()._outlook()

    def _options_from_form(self, formdata: dict[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = super()._options_from_form(formdata)
        if not self._templates():
            return options
        # our form works without JavaScript: a text field is there even where a listed choice is selected
        for name in [name for name in options if name.endswith(UNLISTED)]:
            if options.get(name.removesuffix(UNLISTED), OTHER) != OTHER:
                del options[name]
        options = {name: value for name, value in options.items() if value != OTHER}
        self._remember_submitted(options)
        return options

    # -- a start: the choice --

    async def run_pre_spawn_hook(self) -> None:
        """Run the admin's hook; with templates, check the options and get the share too, after a wait if need be.

        The hub's ``start_timeout`` runs only from `start` on. Raises StartRefused, and then nothing is reserved.
        """
        if not self._templates():
            await maybe_future(super(GPUShareBase, self).run_pre_spawn_hook())
            return
        # of an earlier start: to progress() it would mean that this one is over
        self._start_future = None
        await super().run_pre_spawn_hook()

    async def _choose(self) -> Choice:
        own, own_default = await self._own_profiles_and_default()
        offered = self._cards(own)
        options = self.user_options if self.user_options is not None else {}
        slug = options.get("profile") if isinstance(options, Mapping) else None
        if isinstance(options, Mapping) and not slug:
            allowed = [card for card in offered if card.allows(self.user.name, self.group_names)]
            standard = default_card(allowed, own_default)
            slug = standard.slug if standard is not None else None
            options = {**options, "profile": slug}
        card = next((card for card in offered if card.template is None and card.slug == slug), None)
        if card is None:
            choice = self._chosen(offered, options)
        else:
            self._check_own(own, card.slug)
            self._profile, self._profile_slug = card, card.slug
            choice = Choice(card)
        self._settled = True
        return choice

    def _check_own(self, own: list[dict[str, Any]], slug: str) -> None:
        """Check the choices of a KubeSpawner profile before anything is started, so that the answer is a clear one."""
        try:
            self._validate_user_options(own)
        except ValueError as error:
            raise StartRefused(str(error), reason="bad-options") from None
        check_choices(self._get_profile(slug, own), self.user_options or {})

    def _take(self, choice: Choice) -> None:
        # KubeSpawner applies its own profiles itself, when it starts
        if choice.profile.template is not None:
            super()._take(choice)

    async def load_user_options(self) -> None:
        """Apply what was chosen: a template if its name was, else as KubeSpawner does."""
        if self._settled and self._profile is not None:
            if self._profile.template is None:
                await super().load_user_options()
            return
        # started without a hub: what names no template is KubeSpawner's
        slug = self.user_options.get("profile") if isinstance(self.user_options, dict) else None
        if not slug or not any(template.name == slug for template in self._templates()):
            await super().load_user_options()
            return
        own = await self._own_profiles()
        if any(entry["slug"] == slug for entry in own):
            await super().load_user_options()
            return
        self._overrides.undo()
        self._take(self._chosen(self._cards(own), self.user_options))

    # -- a start: the place --

    async def _place(self, template: Template | None, patience: float, story: Story) -> None:
        if template is not None and template.gpu is not None:
            await self._watch()
            await self._clear_way()
        await super()._place(template, patience, story)

    def _reserved(self, reservation: PodShare) -> None:
        self._reservation, self._perhaps_created = reservation, False

    def _gpus_of(self, reservation: Any) -> str:
        return f"{super()._gpus_of(reservation)} of {reservation.placement.node}"

    async def _clear_way(self) -> None:
        """Remove what an earlier start left: this server's own pod, and pods of servers that the hub has forgotten."""
        pod = self._pod()
        if pod is not None and holds_share(pod) and not pod["metadata"].get("deletionTimestamp"):
            # KubeSpawner would do it when it creates the new one; until then it would hold what this one waits for
            self.log.warning("Removing pod %s, which an earlier start of this server left", self.pod_name)
            try:
                await super(GPUShareBase, self).stop(now=True)
            except Exception as error:
                self.log.warning("Pod %s is not removed yet: %s", self.pod_name, error)
        settings = getattr(self.user, "settings", None)
        if isinstance(settings, dict) and "users" in settings:
            self._remove_orphans_soon()

    def _remove_orphans_soon(self) -> None:
        kept: dict[str, float] = self._shared(("orphans",), dict)
        now = time.monotonic()
        if now - kept.get("looked", -_ORPHANS_EVERY) < _ORPHANS_EVERY:
            return
        kept["looked"] = now
        room = self.reservations
        for pod in orphans(room.cluster.pods(), self.hub.api_url, self._hub_runs, time.time() - _ORPHAN_AGE):
            room.in_background(self._remove_orphan(pod["metadata"]))

    async def _remove_orphan(self, metadata: Mapping[str, Any]) -> None:
        name, namespace = metadata["name"], metadata["namespace"]
        self.log.warning("Removing pod %s/%s: it holds a GPU share, and the hub knows no such server", namespace, name)
        try:
            await self.api.delete_namespaced_pod(
                name=name, namespace=namespace, body={"preconditions": {"uid": metadata["uid"]}}
            )
        except (ApiException, ClientError, TimeoutError) as error:
            self.log.warning("Pod %s/%s is not removed yet: %s", namespace, name, _worded(error))

    def _pod(self) -> Mapping[str, Any] | None:
        reflector = self.pod_reflector
        return reflector.pods.get(f"{self.namespace}/{self.pod_name}") if reflector is not None else None

    # -- a start: the pod --

    async def get_pod_manifest(self) -> V1Pod:
        """KubeSpawner's manifest, and the share in it."""
        pod = await super().get_pod_manifest()
        reservation = self._reservation
        if reservation is None:
            return pod
        layer = NativePodLayer({gpu.uuid: gpu.index for gpu in reservation.gpus}, self.share_unit_size)
        bare = fragment(pod)
        wish = reservation.wish
        changed = await layer.grant(wish.tenant, wish.template, reservation.placement, bare)
        changed["metadata"]["annotations"].update({RESERVATION: reservation.token, HUB: self.hub.api_url})
        return put_back(pod, changed)

    def get_env(self) -> dict[str, Any]:
        """KubeSpawner's environment; a template without a GPU hides those of the node."""
        environment: dict[str, Any] = super().get_env()
        if self._hidden_gpus and not (self.extra_resource_limits or self.extra_resource_guarantees):
            return {**_WITHOUT_GPU, **environment}
        return environment

    async def _start(self) -> Any:
        """KubeSpawner's start, on a node that has room; on another one if the first does not admit the pod."""
        self._story.end()
        try:
            if not self._settled:
                await self.load_user_options()
            template = self._profile.template if self._profile is not None else None
            if template is None or template.gpu is None:
                return await super()._start()
            return await self._start_with_share(template)
        except StartRefused as error:
            self.log.warning("Not starting %s: %s", self._log_name, error.jupyterhub_message)
            self._forget_failure()
            raise
        finally:
            self._retries.end()

    async def _start_with_share(self, template: Template) -> Any:
        self._starting = True
        limit = asyncio.timeout(self.start_timeout - min(1.0, 0.05 * self.start_timeout))
        try:
            async with limit:
                url = await self._start_somewhere(template)
            self._let_arrive()
            return url
        except BaseException as error:
            self._give_back_after_failure()
            if isinstance(error, TimeoutError):
                raise self._too_slow(str(error) if not limit.expired() else "") from None
            raise
        finally:
            self._starting = False

    async def _start_somewhere(self, template: Template) -> Any:
        attempt = 0
        while True:
            attempt += 1
            if self._reservation is None:
                await self._place(template, min(self.queue_timeout, self.start_timeout / 2), self._retries)
            try:
                return await super()._start()
            except NotAdmitted as error:
                await self._leave(error, last=attempt >= self.start_attempts)
            except (ApiException, ClientError, ViewStale) as error:
                if not _passing(error) or attempt >= self.start_attempts:
                    raise _api_refused(error) from error
                self.log.warning("%s: the cluster's API failed: %s; trying again", self._log_name, _worded(error))
                await asyncio.sleep(0.1 * 2**attempt)

    async def _leave(self, error: NotAdmitted, last: bool) -> None:
        """The node did not take the pod: it goes, its place is free, and another one is looked for."""
        ended, reservation = error.ended, self._reservation
        self.log.warning("%s: %s", self._log_name, ended)
        if reservation is not None:
            self.reservations.cluster.distrust(reservation.placement.node)
            self.reservations.give_back(reservation)
            self._reservation = None
        try:
            await super(GPUShareBase, self).stop(now=True)
        except Exception as failure:
            # creating the next one finds it and tries again
            self.log.warning("Pod %s is not removed yet: %s", self.pod_name, failure)
        if last:
            raise StartRefused(
                f"{ended}. This was the last of {self.start_attempts} attempts; nothing is reserved for you. "
                "Try again in a minute; tell the admin if it stays so.",
                reason="not-admitted",
                status=503,
                retry_after=60,
            )
        self._retries.tell(f"{ended}. Looking for another place.")

    def _too_slow(self, said: str) -> StartRefused:
        pod = self._pod()
        why = (why_waiting(pod) if pod is not None else "") or said or ("" if pod else "its pod never showed")
        return StartRefused(
            f"The server did not start within {self.start_timeout} seconds{f' ({why})' if why else ''}. Try again, or "
            "tell the admin.",
            reason="too-slow",
            status=503,
        )

    def _let_arrive(self) -> None:
        if self._reservation is None:
            return
        if self.reservations.arrived(self._reservation, self._pod()):
            self._reservation = None
        else:
            # it stays put aside until the server stops, so nothing is given away twice while this hub runs
            self.log.error(
                "Pod %s has lost the annotations or the label of its GPU share; does a modify_pod_hook replace them?",
                self.pod_name,
            )

    def _give_back_after_failure(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        if self._perhaps_created:
            self.reservations.perhaps_created(reservation)
        else:
            self.reservations.give_back(reservation)

    async def _make_create_pod_request(self, pod: Any, request_timeout: float) -> bool:
        """KubeSpawner's; for a pod with a share, an API server that fails for a moment is asked again."""
        if self._reservation is None:
            created: bool = await super()._make_create_pod_request(pod, request_timeout)
            return created
        self._perhaps_created = True
        try:
            created = await super()._make_create_pod_request(pod, request_timeout)
        except (ApiException, ClientError) as error:
            if not _passing(error):
                raise
            self.log.warning("Pod %s is not created yet: %s", self.pod_name, _worded(error))
            return False
        return created

    async def _make_delete_pod_request(self, *args: Any, **kwargs: Any) -> bool:
        """KubeSpawner's; for a server with a share, an API server that fails for a moment is asked again."""
        try:
            deleted: bool = await super()._make_delete_pod_request(*args, **kwargs)
        except (ApiException, ClientError) as error:
            if not self._profile_slug or not _passing(error):
                raise
            self.log.warning("Pod %s is not deleted yet: %s", self.pod_name, _worded(error))
            return False
        return deleted

    def is_pod_running(self, pod: Any) -> bool:
        """KubeSpawner's. While a server with a share starts, a pod that its node has refused is noticed at once."""
        reservation = self._reservation
        if self._starting and reservation is not None and pod is not None:
            ended = ended_by_node(pod) if annotation(pod, RESERVATION) == reservation.token else None
            if ended is not None:
                raise NotAdmitted(ended)
        running: bool = super().is_pod_running(pod)
        return running

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """The place in the line and the GPU, then what KubeSpawner has to say."""
        if self._templates() and (self.pending or self._placing is not None or self._start_future is not None):
            async for event in self._story.events():
                yield event
        events = super(GPUShareBase, self).progress()
        if self._profile is not None and self._profile.template is not None:
            events = interleaved(events, self._retries.events())
        async for event in events:
            yield event

    # -- a running server --

    async def poll(self) -> int | None:
        """KubeSpawner's. A pod with a share that its node has ended counts as stopped, and the log says why."""
        if not self._profile_slug and not self._templates():
            status: int | None = await super(GPUShareBase, self).poll()
            return status
        if self._placing is None:
            await self._watch_pods_patiently()
            pod = self._pod()
            if pod is not None and is_session(pod["metadata"].get("labels")):
                # a hub that was killed before it saved its state learns the template from the pod
                self._profile_slug = self._profile_slug or annotation(pod, TEMPLATE)
                ended = ended_by_node(pod) if not self._starting else None
                if ended is not None:
                    code = exit_code(pod)
                    self.log.warning("%s: %s. The server can be started again.", self._log_name, ended)
                    if self.delete_stopped_pods:
                        await self.stop(now=True)
                    return code or 1
        return await super().poll()

    async def _watch_pods_patiently(self) -> None:
        # a hub that starts takes a failed poll for a stopped server, and one failed list would do that to all of them
        for pause in (0.2, 0.5, 1.0, 2.0):
            try:
                await self._start_watching_pods()
                return
            except Exception as error:
                self.log.warning("Pods in %s are not watched yet: %s", self.namespace, error)
                await asyncio.sleep(pause)
        await self._start_watching_pods()

    async def stop(self, now: bool = False) -> None:
        """KubeSpawner's. A start that still waits for its share is called off; whoever waits has a look afterwards."""
        await super().stop(now)
        if self._profile_slug and self._templates():
            self.reservations.look_soon()

    def _let_go(self) -> None:
        self._give_back_after_failure()
        self._settled = self._perhaps_created = False
        if self._placing is None:
            self._retries.end()
            self._retries = Story()
        super()._let_go()


def _passing(error: Exception) -> bool:
    """Whether the API may well do it when it is asked again."""
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status == 429 or status >= 500 or status == 0


def _worded(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return str(error) or repr(error)


def _api_refused(error: Exception) -> StartRefused:
    if _passing(error):
        return StartRefused(
            f"The cluster's API does not work well at the moment ({_worded(error)}). Nothing is reserved for you. "
            "Try again in a minute.",
            reason="api-failed",
            status=503,
            retry_after=60,
        )
    said = getattr(error, "body", "") or ""
    try:
        said = str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        said = _worded(error)
    return StartRefused(f"The cluster refuses the server: {said}. Tell the admin.", reason="api-refused", status=502)
