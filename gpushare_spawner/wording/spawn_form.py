"""Sentences of the spawn form: the templates' cards, other sharing layers, and invalid options of a spawn.

A waiting spawn's page and the API also use them. The sentences about the queue and failures are in
`wording.spawn_failures`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from gpushare_spawner.model.layers import LAYERS, IdleReach, Layer, LayerName, Where
from gpushare_spawner.model.layers_file import MigProfile
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, Tier
from gpushare_spawner.model.template import Idle, Resources, Template, TemplateGpu
from gpushare_spawner.wording.amounts import duration, either, gpu_share, guarantee, memory, time_limit
from gpushare_spawner.wording.layers import kept_within

AGENT_SILENT = "the GPU agent of this machine does not answer"
CLUSTER_UNREADABLE = "the hub cannot read the cluster's GPUs and pods"
"""Why free capacity is unknown, as a clause for the form."""


def guaranteed(gpu: TemplateGpu, memory_bytes: int | None, borrowed: int = 0) -> str:
    """Return a session's guarantee. ``memory_bytes``: memory of the smallest suitable GPU; None: unknown.

    ``borrowed``: units of each GPU that idle sessions would lend to it. Lent units and their memory stay guaranteed to
    their owners.
    """
    share = gpu.share
    if share.last_units:
        full = _whole_and_part(gpu, memory_bytes)
    else:
        full = _whole_gpus(gpu, memory_bytes) if share.units == UNITS_PER_GPU else _part(gpu, share.units, memory_bytes)
    if borrowed <= 0:
        return full
    owned = share.units - borrowed
    return guarantee(_part(gpu, owned, memory_bytes) if owned > 0 else "", full)


def _part(gpu: TemplateGpu, units: int, memory_bytes: int | None) -> str:
    written = gpu.memory.guarantee if units == gpu.share.units and gpu.memory.guarantee else f"{units}%"
    gpus, each = ("one GPU's time", "") if gpu.share.count == 1 else (f"the time of {gpu.share.count} GPUs", " each")
    return f"{units} % of {gpus} and {_memory(written, memory_bytes)}{each}"


def _whole_and_part(gpu: TemplateGpu, memory_bytes: int | None) -> str:
    share, guarantee = gpu.share, gpu.memory.guarantee
    whole = "one whole GPU" if share.count == 2 else f"{share.count - 1} whole GPUs"
    last = share.last_units
    part = f"{last} % of another GPU's time and {_memory(guarantee or f'{last}%', memory_bytes)}"
    return f"{whole}, with {_memory(guarantee or '100%', memory_bytes)}{' each' * (share.count > 2)}, and {part}"


def _whole_gpus(gpu: TemplateGpu, memory_bytes: int | None) -> str:
    share = gpu.share
    whole = "one whole GPU" if share.count == 1 else f"{share.count} whole GPUs"
    return f"{whole}, with {_memory(gpu.memory.guarantee or '100%', memory_bytes)}{' each' * (share.count > 1)}"


def maximum(gpu: TemplateGpu, memory_bytes: int | None) -> str:
    """Return the maximum that a session can use; empty if all of it is guaranteed."""
    if gpu.share.least_units < UNITS_PER_GPU:
        most = gpu.time.limit
        several = gpu.share.count > 1
        whole = f"100 % of {'each' if several else 'one'} GPU's time while others are idle"
        time = time_limit(most) if most < UNITS_PER_GPU else whole
        return f"{time}, and {_memory(gpu.memory.limit, memory_bytes)}{' each' * several}"
    return "" if gpu.memory.limit == "100%" else _memory(gpu.memory.limit, memory_bytes)


def _memory(written: str, memory_bytes: int | None) -> str:
    if memory_bytes is not None:
        return f"{memory(resolve_bytes(written, memory_bytes))} of memory"
    if written == "100%":
        return "all of its memory"
    return f"{written[:-1].strip()} % of its memory" if written.endswith("%") else f"{written} of memory"


_WHOLE_REACH = LAYERS[LayerName.NATIVE].reach


def idle_actions(template: Template, reach: Collection[IdleReach] = _WHOLE_REACH) -> list[str]:
    """Return the template's idle actions, one phrase each; empty: none.

    ``reach``: the idle actions that the GPU's sharing layer supports.
    """
    idle: Idle = template.idle
    if idle.dry_run:
        return []
    actions = []
    share = template.share
    waits = " if a spawn waits for it" if idle.when == "pressure" else ""
    if idle.downgrade_after is not None and share is not None and IdleReach.DOWNGRADE in reach:
        smaller = gpu_share(idle.units(Tier.DOWNGRADED, share), share.count)
        actions.append(f"after {duration(idle.downgrade_after)}, downgraded to {smaller}{waits}")
    if idle.release_after is not None and IdleReach.RELEASE in reach:
        actions.append(f"after {duration(idle.release_after)}, released and lent{waits}")
    if idle.stop_after is not None:
        actions.append(f"after {duration(idle.stop_after)}, the server is stopped")
    return actions


def takes_idle_share(template: Template, reach: Collection[IdleReach] = _WHOLE_REACH) -> bool:
    """Return whether an idle session loses units until it uses the GPU again. ``reach``: see `idle_actions`."""
    idle = template.idle
    downgraded = idle.downgrade_after is not None and IdleReach.DOWNGRADE in reach
    released = idle.release_after is not None and IdleReach.RELEASE in reach
    return not idle.dry_run and (downgraded or released)


def machine(resources: Resources) -> str:
    """Return the server's CPU and memory."""
    cpu, host = resources.cpu, resources.memory
    parts = [
        _between(cpu.guarantee, cpu.limit, lambda cores: f"{cores:g}", "CPU cores"),
        _between(host.guarantee, host.limit, memory, "memory"),
    ]
    return " · ".join(part for part in parts if part)


def _between(guarantee: float | None, limit: float | None, shown: Callable[[float], str], unit: str) -> str:
    if limit is None:
        return f"{shown(guarantee)} {unit}" if guarantee is not None else ""
    if guarantee is None:
        return f"up to {shown(limit)} {unit}"
    return f"{shown(guarantee)} {unit}" if guarantee == limit else f"{shown(guarantee)} to {shown(limit)} {unit}"


def neighbours(template: Template) -> str:
    """Return which sessions can be on the GPUs of the template's sessions; empty: any."""
    rules = template.placement
    if rules.alone:
        return "no other session"
    near = f"sessions labelled {either(rules.near)}, if any run" if rules.near else ""
    apart_from = f"never sessions labelled {either(rules.apart_from)}" if rules.apart_from else ""
    return "; ".join(filter(None, [near, apart_from]))


def priority(template: Template) -> str:
    """Return the template's place in the queue; empty: that of most templates, or no GPU."""
    if template.gpu is None:
        return ""
    return {"low": "low: later in the queue", "high": "high: earlier in the queue"}.get(template.priority, "")


def gpu_models(share: Share, counts: Mapping[str, int]) -> str:
    """Return the GPUs that suit the share: "1 of 2 × NVIDIA L4". ``counts``: number of suitable GPUs by model."""
    return ", ".join(
        f"{share.count} of {count} × {model}" if count > share.count else model for model, count in counts.items()
    )


LONGEST_SHOWN = 80
"""Maximum characters of an invalid value that a message quotes."""
TEMPLATES_AWAITED = (
    "This hub has no compute templates yet, so no server is started. Try again in a few minutes, or ask the admin of "
    "this hub."
)
NO_TEMPLATE = "There is no compute template that you may use. Ask the admin of this hub."


def templates_awaited(folder: str) -> str:
    """Return, for the hub's log, that the hub waits for templates. ``folder``: the templates' folder."""
    return (
        f"There is no valid compute template in {folder}, which $GPUSHARE_TEMPLATES names: waiting for files there, on "
        "Kubernetes for the ConfigMap gpushare-templates, whose files appear a minute or two after it was created"
    )


def shown(value: object) -> str:
    """Return a request's value as truncated text."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def named(display_name: str, key: str) -> str:
    """Return the name on the form, with the key in requests if it differs: "0.25 GPU (quarter)"."""
    return display_name if display_name == key else f"{display_name} ({key})"


def listed(choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an option's choices, separated by commas. ``choices``: by their keys in requests."""
    names = (named(str(choice.get("display_name") or key), key) for key, choice in choices.items())
    return ", ".join(names) or "those on the form"


def not_an_object(options: object) -> str:
    """Return that the options must be an object."""
    return f'The options of a server must be an object like {{"profile": "quarter-gpu"}}, not {shown(options)}.'


def not_a_name(profile: object) -> str:
    """Return that the option ``profile`` must be text."""
    return f"profile must be the name of a template, not {shown(profile)}."


def not_allowed(template: str, allowed: Iterable[str]) -> str:
    """Return that the template is for other users. ``template``, ``allowed``: see `named`."""
    return (
        f"You may not use the template {template}. It is for certain users and groups. "
        f"You may use: {', '.join(allowed) or 'none'}."
    )


ONLY_ADMINS_PIN = "Only an admin can choose the GPU of a server: remove the option placement."


def wrong_pin(fault: str) -> str:
    """Return that the option does not name a GPU or nodes. ``fault``: the field and its mistake."""
    return f"The option placement: {fault}"


def contradicts(template: str, why: str, origin: str) -> str:
    """Return that an admin's rules for the user's GPUs exclude a template. ``why``: a clause about the template."""
    return f"{template} cannot start here: {why}, as {origin} says. Choose another template, or ask the admin."


def unknown_template(template: str, allowed: Iterable[str]) -> str:
    """Return that a template does not exist. ``allowed``: the names that this user may use, see `named`."""
    return f"There is no template {shown(template)}. You may use: {', '.join(allowed) or 'none'}."


def unknown_quota(quota: object, quotas: Iterable[str]) -> str:
    """Return that the user does not have a quota. ``quotas``: the names that this user may use."""
    return f"You have no quota {shown(quota)}. You may use: {', '.join(quotas)}."


def unknown_option(option: object, profile: str, options: Iterable[str]) -> str:
    """Return that the profile does not have an option. ``options``: the profile's options."""
    return f"Unknown option {shown(option)}; {profile} has: {', '.join(options)}."


def limit_reached(limit: int, profile: str) -> str:
    """Return that the user already runs the maximum number of servers with the profile."""
    servers = "one server" if limit == 1 else f"{limit} servers"
    return f"You may run {servers} with {profile} at a time. Stop one first, or choose another template."


def unknown_choice(where: str, choice: object, choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return that an option lacks a choice. ``where``: the profile and the option; ``choices``: see `listed`."""
    return f"{where}: there is no choice {shown(choice)}; choose one of {listed(choices)}."


def only_listed_choices(where: str, choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return that an option accepts no text other than its choices, see `listed`."""
    return f"{where}: choose one of {listed(choices)}."


def text_too_long(where: str, most: int) -> str:
    """Return that an option's value is not text, or has more than ``most`` characters."""
    return f"{where}: write at most {most} characters of text."


def unusable_pattern(where: str, problem: str) -> str:
    """Return that the admin's pattern for an option's text cannot be used. ``problem``: the reason and the remedy."""
    return f"{where}: no text can be accepted, because {problem}. Tell the admin of this hub (validation_regex)."


def text_does_not_match(where: str, text: str, advice: str) -> str:
    """Return that an option's text is invalid. ``advice``: a valid text, without a period."""
    return f"{where}: {shown(text)} is not valid: {advice}."


def cannot_apply(template: str, why: str) -> str:
    """Return that the spawner cannot apply a template's settings. ``template``: see `named`."""
    return f"The template {template} cannot be started on this hub: {why}. Tell the admin."


NOT_READ_YET = "The hub has not read the cluster's nodes and pods yet."


def needs_cluster(template: str, title: str) -> str:
    """Return that a template's layer does not work on this machine."""
    return (
        f"The template {template} shares GPUs by {title}, which works on Kubernetes only. Tell the admin: remove "
        "gpu.layer from the template."
    )


def needs_one_gpu(template: str, layer: Layer) -> str:
    """Return that a layer cannot give a server a second GPU on one machine."""
    why = (
        "CUDA uses one MIG instance only"
        if layer.name is LayerName.MIG
        else "On one machine each GPU has an MPS daemon of its own, and a server can use one of them"
    )
    return (
        f"The template {template} asks for several GPUs by {layer.title}. {why}. Tell the admin: write count: 1, or a "
        "fraction."
    )


def not_on_one_machine(template: Template) -> str:
    """Return why a template's layer cannot give a server a GPU on one machine; empty if it can."""
    if template.gpu is None:
        return ""
    layer = LAYERS[template.gpu.layer or LayerName.NATIVE]
    if Where.ONE_MACHINE not in layer.where:
        return needs_cluster(template.display_name, layer.title)
    if layer.name is not LayerName.NATIVE and template.gpu.share.count > 1:
        return needs_one_gpu(template.display_name, layer)
    return ""


def no_instance(share: Share, profiles: Iterable[str]) -> str:
    """Return that no MIG instance of this machine is large enough. ``profiles``: those of its instances."""
    there = ", ".join(sorted(set(profiles)))
    if not there:
        return "This machine has no MIG instance. Choose another template, or ask the admin."
    return (
        f"No MIG instance that the template accepts provides {share} with the memory that it guarantees. This machine "
        f"has: {there}. Choose another template, or ask the admin."
    )


def layer_taken(share: Share) -> str:
    """Return that the GPUs with free capacity for a share under MPS have sessions of another layer."""
    return (
        f"{share} is free on a GPU, but the sessions there do not use {LAYERS[LayerName.MPS].title}, and a GPU cannot "
        "have both kinds. The server starts when they have ended."
    )


def no_node(layers: Iterable[LayerName]) -> str:
    """Return that none of the server's possible nodes has any of the layers."""
    titles = " or ".join(LAYERS[name].title for name in layers)
    return f"No node that this server can run on shares its GPUs by {titles}. Ask the admin."


def not_understood(title: str) -> str:
    """Return that the hub failed to parse an object that a layer published."""
    return f"The hub cannot read the free capacity that {title} publishes. The hub's log has the error."


def unreadable(title: str) -> str:
    """Return that the hub lacks the permission to read the cluster, which the layer needs."""
    return (
        f"The hub may not read the cluster's nodes and pods, which it needs for {title}. Tell the admin: the agents' "
        "chart gives the right with hub.readCapacity."
    )


def other_object(kind: str, name: str, namespace: str) -> str:
    """Return that another program created an object with the name that a layer needs."""
    return (
        f"The {kind} {name} in namespace {namespace} does not match the template: the hub did not create it. "
        f"Delete it, or ask the admin to: kubectl -n {namespace} delete {kind.lower()} {name}"
    )


def none_free(title: str, share: Share, limited_by: str) -> str:
    """Return that a layer has no free capacity for the share. ``limited_by``: another shortage, as a clause."""
    return f"Not enough free capacity: this needs {share}, and {title} has no free place for it{_because(limited_by)}."


def never_free(title: str, share: Share, limited_by: str) -> str:
    """Return that a layer could not serve the share even on empty GPUs. ``limited_by``: a clause."""
    return f"No GPU that {title} shares can give {share}{_because(limited_by)}. Choose another template."


def _because(limited_by: str) -> str:
    return f" ({limited_by})" if limited_by else ""


def placed(title: str) -> str:
    """Return that a spawn no longer waits."""
    return f"{title} has a free place. Its scheduler chooses the GPU."


def terms(layer: Layer, profile: MigProfile | None = None) -> str:
    """Return, for a card, which layer shares the server's GPU, and the effect on its share.

    ``profile``: that of the server's MIG instance; None if it gets none or the profile is unknown.
    """
    if profile is None:
        return f"By {layer.title}. {kept_within(layer)}"
    return f"By {layer.title}. Each server has a MIG instance ({profile.name}) to itself: {_size(profile)}."


def _size(profile: MigProfile) -> str:
    size = memory(profile.memory_bytes)
    if profile.slices == profile.compute_slices:
        return f"one whole GPU, with {size} of memory"
    return f"{instance_time(profile)} and {size} of memory"


def instance_time(profile: MigProfile) -> str:
    """Return the fraction of a GPU's time that a MIG instance has."""
    return f"{profile.slices}/{profile.compute_slices} of one GPU's time"
