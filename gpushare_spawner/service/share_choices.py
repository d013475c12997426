"""Which templates have a share that a running session can change to. Pure.

Whether the units are free, and what a quota admits, is another question: `service.actions.share`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gpushare_spawner.model.report import GpuReport, SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import suits


def templates_of_kind(
    session: SessionReport, gpus: Iterable[GpuReport], templates: Mapping[str, Template]
) -> list[Template]:
    """Return the templates with a share of one GPU of the session's kind, and with memory of the same kind.

    ``gpus``: of the session's node. None for a session on several GPUs: it has whole ones.
    """
    on = [gpu for gpu in gpus if gpu.uuid in session.gpus]
    own = templates.get(session.template)
    if len(session.gpus) != 1 or not on:
        return []
    found = []
    for template in templates.values():
        gpu = template.gpu
        if gpu is None or gpu.share.count != 1 or not all(suits(gpu, one.model, one.memory_bytes) for one in on):
            continue
        if own is None or own.gpu is None or own.gpu.memory.kind == gpu.memory.kind:
            found.append(template)
    return found


def allowed(templates: Iterable[Template], user: str, groups: Collection[str] | None) -> list[Template]:
    """Return those that a user may use. ``groups``: the user's; None: unknown, and none count."""
    return [one for one in templates if one.access.allows(user, frozenset(groups or ()))]


def units_of(template: Template) -> int:
    """Return the units of a template's share on each GPU; 0 without a GPU."""
    return template.gpu.share.units if template.gpu is not None else 0


def other_units(session: SessionReport, templates: Iterable[Template]) -> tuple[int, ...]:
    """Return the shares of templates in units, without the session's own, the smallest first."""
    return tuple(sorted({units_of(one) for one in templates} - {session.share_units, 0}))
