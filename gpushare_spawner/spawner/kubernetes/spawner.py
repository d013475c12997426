"""KubeSpawner with shared GPUs; an adapter from KubeSpawner's methods to the parts in this package.

A spawn goes through `base` (the common steps), `options` (the choice), `reservations` (a place, perhaps after a wait),
`pod` (the manifest) and `attempt` (the spawn's state, its attempts, and the admission of the pod by its node).
`cluster.reflectors` keeps the watches running, `cluster.snapshot` reads them, and `owned_objects` removes obstructing
pods.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyterhub.utils import maybe_future

from gpushare_spawner.wording.amounts import missing_package

try:
    from kubespawner import KubeSpawner
except ImportError as error:
    raise ImportError(missing_package("GPUShareSpawner", error)) from error

from kubernetes_asyncio.client.models import V1Pod
from traitlets import Bool, Float, Integer, TraitError, default, validate

from gpushare_spawner.clients.api import ApiFailure, ClusterApi, KubeconfigConnection
from gpushare_spawner.model.report import MOST_OVERCOMMIT
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.request import Demand
from gpushare_spawner.sharing.base import LayerCannot, Tenant
from gpushare_spawner.spawner.attempt import SpawnPhase, SpawnProgress
from gpushare_spawner.spawner.base import FORM_SECONDS, GPUShareBase, applied_when_placed
from gpushare_spawner.spawner.form import without_idle_fields
from gpushare_spawner.spawner.hub import SpawnRefused, refusals_reported
from gpushare_spawner.spawner.kubernetes.attempt import PodAttempt, PodLauncher, ServerPod, request_succeeded
from gpushare_spawner.spawner.kubernetes.cluster.layers import LayerReader
from gpushare_spawner.spawner.kubernetes.cluster.node_resources import ClusterResources
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import (
    PODS,
    REPORTS,
    DatedPodReflector,
    ReportReflector,
    Watches,
)
from gpushare_spawner.spawner.kubernetes.cluster.snapshot import ClusterSnapshots
from gpushare_spawner.spawner.kubernetes.form import NAMES, Offer, checked_texts, names_template
from gpushare_spawner.spawner.kubernetes.kubespawner_private import KubeSpawnerPrivate
from gpushare_spawner.spawner.kubernetes.owned_objects import PodObjects, claim_of, token_secret
from gpushare_spawner.spawner.kubernetes.pod import (
    CONSTRAINING,
    REQUESTING,
    WITHOUT_GPU,
    build_pod,
    pinned_node,
    pod_constraints,
    prefer_node,
    requested,
)
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation, PodReservations
from gpushare_spawner.spawner.options import Choice, Overrides, Profile
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.wording import spawn_form as words
from gpushare_spawner.wording.spawn_form import CLUSTER_UNREADABLE

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The file in which the kubelet writes the namespace of a pod that has a service account."""

_TEMPLATES = "/etc/gpushare/templates"

_TEMPLATES_FOR = 0.5
"""Seconds for which templates are reused without reading them again; one spawn needs them many times."""


class GPUShareSpawner(GPUShareBase, KubeSpawner):  # type: ignore[misc]
    """KubeSpawner with shared GPUs.

    Every setting, hook and profile of KubeSpawner works unchanged. Compute templates are offered in addition to
    ``profile_list``; without templates, the spawner behaves like KubeSpawner.
    """

    unavailable = CLUSTER_UNREADABLE

    _attempt: PodAttempt

    share_unit_size = Integer(
        1,
        min=1,
        max=100,
        help="""
        Number of units of 1 % of a GPU that one device of the agents' device plugin represents; the agents'
        ``--unit-size``.
        """,
    ).tag(config=True)

    claims_overcommit = Float(
        1.0,
        min=1,
        max=MOST_OVERCOMMIT,
        help="""
        Maximum factor by which the units of a GPU are overcommitted on nodes where pods get GPUs by claims: the agents'
        ``--overcommit`` (the chart's ``gpus.overcommit``).

        The status of such a node does not contain the number of units of its GPUs. A report with more units is refused.
        """,
    ).tag(config=True)

    nodes_are_added = Bool(
        False,
        help="""
        Whether nodes are sometimes added to the cluster with GPU models that no current node has, or with more GPUs,
        CPU or memory than any current node.

        If true, a spawn that no current node could take, even an empty node, waits in the queue for such a node. If
        false, the spawn is refused immediately, and its user sees what is missing. The queue creates no pod for a
        waiting spawn, so a cluster autoscaler adds no node for it: set this if nodes are added on a schedule, for
        placeholder pods, or manually.
        """,
    ).tag(config=True)

    place_without_gpu = Bool(
        False,
        help="""
        Whether a server of a template without a GPU prefers the node that ``placement_strategy`` chooses for its CPU
        and memory, so that it takes no CPU that GPUs need.

        For clusters where such servers run on nodes with GPUs. Without this setting, and where the node is full, the
        cluster's scheduler decides.
        """,
    ).tag(config=True)

    @validate("share_unit_size")
    def _valid_share_unit_size(self, proposal: Any) -> int:
        size: int = proposal["value"]
        if UNITS_PER_GPU % size:
            raise TraitError(f"share_unit_size {size} does not divide {UNITS_PER_GPU}: use one like 1, 5 or 25")
        return size

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kubespawner = KubeSpawnerPrivate(self, super())
        self._kubespawners_form: Any = None

    # -- the parts --

    @property
    def reservations(self) -> PodReservations:
        """The shares in flight and the queue, one for all spawners of the hub."""
        return self._shared(("cluster", self._reports_namespace), self._new_reservations)

    @functools.cached_property
    def _reports_namespace(self) -> str:
        """The namespace in which the nodes' agents publish their reports: the hub's own."""
        if namespace := os.environ.get("POD_NAMESPACE"):
            return namespace
        if NAMESPACE_FILE.exists():
            return NAMESPACE_FILE.read_text().strip()
        # a user's namespace differs from the hub's
        return self._kubespawner.default_namespace() if self.enable_user_namespaces else str(self.namespace)

    def _new_reservations(self) -> PodReservations:
        api = self._cluster_api()
        node_resources = ClusterResources(api, self.log)
        cluster = ClusterSnapshots(
            self.reflectors,
            self._reports_key,
            self.share_unit_size,
            self.log,
            node_resources,
            layers=LayerReader(node_resources, api, self._policy_in_force(), self.log),
            claimed_capacity=round(self.claims_overcommit * UNITS_PER_GPU),
        )
        return PodReservations(cluster, self.log, nodes_are_added=self.nodes_are_added, **self._queue_settings())

    def _cluster_api(self) -> ClusterApi:
        return ClusterApi(KubeconfigConnection(self.api.api_client))

    @property
    def _reports_key(self) -> tuple[str, str]:
        return (REPORTS, self._reports_namespace)

    @property
    def _watches(self) -> Watches:
        return Watches(self._kubespawner, self.reflectors, self.namespace, self.log)

    @property
    def _pod_objects(self) -> PodObjects:
        return self._shared(("objects",), lambda: PodObjects(self._cluster_api(), self.reservations, self.log))

    def _new_attempt(self) -> PodAttempt:
        return PodAttempt(
            Overrides(self, also=NAMES), lambda share, created: self._pod_objects.give_back(share, created)
        )

    def _pod(self) -> Mapping[str, Any] | None:
        reflector = self.pod_reflector
        return reflector.pods.get(f"{self.namespace}/{self.pod_name}") if reflector is not None else None

    async def _stop_pod(self) -> None:
        await super().stop(now=True)

    # -- profiles --

    def _templates(self) -> tuple[Template, ...]:
        """Return the templates in force. Without templates, the spawner behaves like KubeSpawner."""
        if self.templates_dir == _TEMPLATES and not os.path.isdir(_TEMPLATES):
            # Templates are optional here, so log no error.
            return ()
        return self.templates_of_user(_TEMPLATES_FOR)

    async def offered(self) -> list[Profile]:
        """Return the templates' cards, then those of KubeSpawner's ``profile_list``."""
        return list((await self._offer()).cards)

    async def _offer(self) -> Offer:
        written = self.profile_list
        if callable(written):
            written = await maybe_future(written(self))
        offer = Offer.of(self._templates(), written, self._kubespawner.complete_profiles(written or []))
        for name in offer.clashes:
            text = "The template %r is not offered: profile_list has a profile with that slug"
            self._log_once(("clash", name), text, name)
        return offer

    # -- the form --

    @default("options_form")
    def _options_form_default(self) -> Any:
        self._kubespawners_form = super()._options_form_default()
        return self._kubespawners_form

    async def get_options_form(self) -> Any:
        """Return KubeSpawner's form or an admin's ``options_form``; with templates, a form with all cards."""
        if not self._templates() or self._has_own_options_form():
            return await super().get_options_form()
        return await self.show_form()

    def _has_own_options_form(self) -> bool:
        """Return whether the admin has set ``options_form``."""
        form = self.options_form
        return form is not self._kubespawners_form and form != self._kubespawners_form

    def _has_own_form(self) -> bool:
        """Return whether the admin has replaced KubeSpawner's form."""
        paths = self.additional_profile_form_template_paths
        return bool(self.profile_form_template) or any(
            os.path.exists(os.path.join(path, "form.html")) for path in paths
        )

    async def show_form(self) -> str:
        """Return the form's HTML, for this user and the current free capacity."""
        offer = await self._offer()
        cards = self._allowed(offer.cards)
        asks_gpu = any(card.template is not None and card.template.gpu is not None for card in cards)
        availability_now = await self._availability_if_watched() if asks_gpu else None
        if self._has_own_form():
            own = self._kubespawner.rendered_form(offer.entries(cards, availability_now, self._quota_choices()))
            return self._below_stop_note(own)
        chosen, standard = self._chosen_before(), offer.default_of(cards)
        if standard is not None and chosen.get("profile") not in [card.slug for card in cards]:
            chosen = {"profile": standard.slug}
        return self._rendered_form(cards, chosen, availability_now)

    async def _availability_if_watched(self) -> Any:
        try:
            await asyncio.wait_for(self._watch(), FORM_SECONDS)
        except TimeoutError:
            self.log.warning("The form is shown without free capacity: the watch of pods was not ready in time")
            return None
        return await self._availability_now()

    def _options_from_form(self, formdata: dict[str, Any]) -> dict[str, Any]:
        """Return KubeSpawner's options of the submitted form, and remember them for the form after a refusal."""
        options: dict[str, Any] = super()._options_from_form(formdata)
        if not self._templates():
            return options
        if not self._has_own_options_form() and not self._has_own_form():
            options = without_idle_fields(options)
        self._remember_submitted(options)
        return options

    # -- the watches --

    async def _start_reflector(self, kind: str, reflector_class: Any, replace: bool = False, **kwargs: Any) -> Any:
        if kind == PODS:
            reflector_class = DatedPodReflector
        if not self._templates():
            return await super()._start_reflector(kind, reflector_class, replace, **kwargs)
        return await self._watches.start(kind, reflector_class, replace, **kwargs)

    async def _watch(self) -> None:
        self.reservations.cluster.node_resources.begin()
        await self._watches.ensure(
            self._reports_key, lambda: ReportReflector(parent=self, namespace=self._reports_namespace)
        )

    # -- a spawn, before start --

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[..., None] | None:
        # with templates, the hub need not warn that the options are not used
        return applied_when_placed if self._templates() else None

    def run_pre_spawn_hook(self) -> Any:
        """Run the admin's hook; with templates, also check the options and reserve the share, perhaps after a wait.

        The hub's ``start_timeout`` begins with `start`. Raises SpawnRefused; then nothing is reserved.
        """
        if not self._templates():
            self._refuse_while_templates_are_awaited()
            self._decided.set()
            return super().run_pre_spawn_hook()
        self._kubespawner.forget_last_start()
        return self._prepare(super().run_pre_spawn_hook)

    def _refuse_while_templates_are_awaited(self) -> None:
        """Raise SpawnRefused if the hub's environment promises templates and nothing else is offered.

        Otherwise KubeSpawner would start a server without a GPU, which the user did not request.
        """
        if self.templates_dir == os.environ.get("GPUSHARE_TEMPLATES") and not self.profile_list:
            self.log.warning("%s", words.templates_awaited(self.templates_dir))
            with refusals_reported(self):
                raise SpawnRefused(words.TEMPLATES_AWAITED, reason="no-templates-yet", status=503, retry_after=60)

    async def _choose(self) -> Choice:
        offer = await self._offer()
        return offer.choose(self.user_options, self._allowed, self._chosen, self._kubespawner.profile_of)

    async def _get_ready(self, choice: Choice) -> None:
        template = choice.profile.template
        if template is None:
            # KubeSpawner applies its own profiles when it starts
            return
        attempt = self._attempt
        attempt.overrides.apply_choice(choice)
        if template.gpu is not None:
            attempt.reserved(await self._reserve(choice, template, self.queue_timeout, attempt.progress))
            return
        if choice.quota:
            await self._watch()
        await self._admit_without_gpu(choice, template)

    async def _reserve(
        self, choice: Choice, template: Template, patience: float, progress: SpawnProgress
    ) -> PodReservation:
        """Reserve a share, waiting at most ``patience`` seconds. ``progress`` receives the events."""
        await self._watch()
        await self._clear_way()
        request = self._request(choice, template)
        share: PodReservation = await self._reserve_share(request, choice.alternatives, patience, progress)
        return share

    def _request(self, choice: Choice, template: Template) -> SpawnRequest:
        """Return the spawn's placement request, with the settings that result from the choice."""
        settings = self._pod_settings()
        node = pinned_node(settings)
        request = SpawnRequest(
            Tenant(self.user.name, self.name, quota=choice.quota, user_units=choice.user_units),
            template,
            self._kubespawner.expanded(node) if node else "",
            requested(settings),
            ineligible=self._ineligible_under(settings),
        )
        return replace(request, left_out=functools.partial(self.reservations.exclusions.of, request))

    def _pod_settings(self) -> dict[str, Any]:
        """Return the settings that decide on which nodes the pod can run."""
        return {name: getattr(self, name) for name in (*CONSTRAINING, *REQUESTING)}

    def _ineligible_under(self, settings: Mapping[str, Any]) -> Callable[[], frozenset[str]]:
        """Return a function that returns the nodes that cannot run a pod with these settings."""
        constraints = pod_constraints(settings, self._kubespawner.sorted_values)
        return (
            functools.partial(self.reservations.cluster.node_resources.ineligible, constraints)
            if constraints
            else frozenset
        )

    def _ineligible(self) -> Callable[[Template], Callable[[], frozenset[str]]]:
        shared: list[Callable[[], frozenset[str]]] = []

        def of(template: Template) -> Callable[[], frozenset[str]]:
            own = template.profile_options or not template.kubespawner_override.keys().isdisjoint(CONSTRAINING)
            if shared and not own:
                return shared[0]
            settings = self._attempt.overrides.instead(Profile.of_template(template), CONSTRAINING)
            ineligible = self._ineligible_under(settings) if settings is not None else frozenset
            if not own:
                shared.append(ineligible)
            return ineligible

        return of

    async def _clear_way(self) -> None:
        await self._pod_objects.remove_leftover(self._pod(), self._stop_pod)
        settings = getattr(self.user, "settings", None)
        if isinstance(settings, dict) and "users" in settings:
            self._pod_objects.remove_orphans_soon(self.hub.api_url, self._hub_runs)

    # -- a spawn, in start --

    def start(self) -> Any:
        """Start as KubeSpawner does. A pod with a share that its node does not admit is tried on another node."""
        if self._attempt.phase not in (SpawnPhase.NEW, SpawnPhase.READY):
            # A script uses this spawner without a hub. A hub clears the state before each spawn.
            self._forget_attempt()
        return super().start()

    async def _start(self) -> Any:
        attempt = self._attempt
        attempt.progress.end()
        try:
            with refusals_reported(self):
                if not attempt.chosen and (choice := await self._template_choice()) is not None:
                    attempt.choose(choice)
                if not attempt.chosen:
                    return await self._kubespawner.start_pod()
                with attempt.starting():
                    return await self._start_chosen(attempt)
        finally:
            attempt.retry_events.end()

    async def _start_chosen(self, attempt: PodAttempt) -> Any:
        choice, template = attempt.choice, attempt.template
        if choice is None or template is None or template.gpu is None:
            if self.place_without_gpu and template is not None:
                attempt.preferred_node = await self._node_without_gpu()
            return await self._kubespawner.start_pod()
        patience = min(self.queue_timeout, self.start_timeout / 2)
        pod = ServerPod(
            reserve=lambda: self._reserve(choice, template, patience, attempt.retry_events),
            start=lambda: self._start_pod(attempt),
            remove=lambda: self._pod_objects.remove_own(self.pod_name, self._stop_pod),
            read=self._pod,
            events=lambda: self.events,
        )
        launcher = PodLauncher(attempt, self.reservations, pod, self.start_timeout, self.log, self._log_name)
        return await launcher.launch()

    async def _node_without_gpu(self) -> str:
        await self._watch()
        settings = self._pod_settings()
        if pinned_node(settings):
            return ""
        amounts = requested(settings)
        demand = Demand(0, 0, amounts.cpu, amounts.memory, ineligible=self._ineligible_under(settings)())
        return await self.reservations.node_without_gpu(demand)

    async def _start_pod(self, attempt: PodAttempt) -> Any:
        """Create the sharing layer's additional objects, then start the pod as KubeSpawner does."""
        offer = attempt.reservation.offer if attempt.reservation is not None else None
        if offer is not None:
            try:
                await self._pod_objects.make_for_layer(self.namespace, offer)
            except LayerCannot as error:
                raise SpawnRefused(str(error), reason="bad-template", status=500) from None
        return await self._kubespawner.start_pod()

    def _validate_user_options(self, profile_list: Sequence[Mapping[str, Any]]) -> None:
        """Check the options for a KubeSpawner profile. Raises ValueError."""
        super()._validate_user_options(checked_texts(profile_list, self.user_options))

    async def load_user_options(self) -> None:
        """Apply the chosen template if the options name one; otherwise do as KubeSpawner does."""
        attempt = self._attempt
        if attempt.chosen:
            if attempt.template is None:
                await super().load_user_options()
            return
        choice = await self._template_choice()
        if choice is None:
            await super().load_user_options()
        else:
            attempt.apply(choice)

    async def _template_choice(self) -> Choice | None:
        """Return the choice for options that name a template; None if KubeSpawner handles the options."""
        if not names_template(self.user_options, self._templates()):
            return None
        offer = await self._offer()
        card = offer.card(self.user_options["profile"])
        return self._chosen(offer.cards, self.user_options) if card is not None and card.template is not None else None

    async def get_pod_manifest(self) -> V1Pod:
        """Return KubeSpawner's manifest with the share."""
        pod: V1Pod = await super().get_pod_manifest()
        share = self._attempt.reservation
        if share is not None:
            return build_pod(pod, share, self.share_unit_size, self.hub.api_url, self.namespace)
        if self._attempt.preferred_node:
            prefer_node(pod.spec, self._attempt.preferred_node)
        return pod

    def get_env(self) -> dict[str, Any]:
        """Return KubeSpawner's environment; a template without a GPU hides the GPUs of the node."""
        environment: dict[str, Any] = super().get_env()
        if self._attempt.hides_gpus and not (self.extra_resource_limits or self.extra_resource_guarantees):
            return {**WITHOUT_GPU, **environment}
        return environment

    async def _make_create_pod_request(self, pod: Any, request_timeout: float) -> bool:
        if not self._templates():
            return bool(await super()._make_create_pod_request(pod, request_timeout))
        attempt = self._attempt
        try:
            if attempt.secret[0] is not pod:
                may = await self._pod_objects.may_make_secrets(self.namespace)
                attempt.secret = pod, token_secret(pod, self.api_token) if may else None
        except ApiFailure as failure:
            self.log.warning("Pod %s is not created yet: %s", self.pod_name, failure)
            return False
        request = super()._make_create_pod_request(pod, request_timeout)
        created = await attempt.pod_created(request, self.pod_name, self.log)
        if created:
            claim = claim_of(attempt.reservation, self.pod_name, self.namespace)
            await self._pod_objects.make(self.pod_name, self.namespace, attempt.secret[1], claim)
        return created

    async def _make_delete_pod_request(self, *args: Any, **kwargs: Any) -> bool:
        request = super()._make_delete_pod_request(*args, **kwargs)
        if not self._attempt.template_name:
            return bool(await request)
        return await request_succeeded(request, f"Pod {self.pod_name} is not deleted yet", self.log)

    def is_pod_running(self, pod: Any) -> bool:
        """Return whether the pod runs. Raises NotAdmitted if its node refuses a pod with a share."""
        admission, runs = self._attempt.admission, super().is_pod_running
        return bool(runs(pod)) if admission is None else admission.runs(pod, runs)

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the position in the queue and the GPU, then KubeSpawner's events."""
        begun = self.pending or self._attempt.phase is SpawnPhase.PLACING or self._kubespawner.was_started
        async for event in self._attempt.events(bool(begun and self._templates()), super().progress()):
            yield event

    # -- a running server --

    async def poll(self) -> int | None:
        """Return KubeSpawner's status.

        A pod with a share that its node has ended counts as stopped, and the log contains the reason. The same applies
        to an incomplete pod of an earlier hub process.
        """
        if self._is_undecided:
            return 1 if await self._refused_at_once() else None
        attempt = self._attempt
        if attempt.phase is SpawnPhase.PLACING:
            return None
        if attempt.template_name or self._templates():
            await self._watches.pods_patiently()
            ended = attempt.ended_by_node(self._pod())
            if ended is not None:
                self.log.warning("%s: %s. The server can be started again.", self._log_name, ended)
                if self.delete_stopped_pods:
                    await self.stop(now=True)
                return ended.exit_code or 1
            if await self._is_half_made():
                self.log.warning("%s: the hub ended while it made the server's pod. Start it again.", self._log_name)
                await self.stop(now=True)
                return 1
        status: int | None = await super().poll()
        return status

    async def _is_half_made(self) -> bool:
        """Return whether an earlier hub ended between the creation of the server's pod and of its objects."""
        pod = self._pod()
        if self._attempt.phase not in (SpawnPhase.NEW, SpawnPhase.STARTED) or pod is None:
            return False
        if (pod.get("status") or {}).get("phase") != "Pending" or pod["metadata"].get("deletionTimestamp"):
            return False
        return await self._pod_objects.missing(pod)

    async def stop(self, now: bool = False) -> None:
        """Stop the server. A spawn that still waits for its share is cancelled; queued spawns are placed afterwards."""
        if not self._attempt.call_off():
            await super().stop(now)
        if self._attempt.template_name and self._templates():
            self.reservations.place_soon()
