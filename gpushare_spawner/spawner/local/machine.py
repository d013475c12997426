"""CPU and memory of the hub's machine, as placement counts them.

Nothing here limits a server: the spawner does. Where it does not, CPU and memory do not count; see
`GPUShareMixin.enforces_resources`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from gpushare_spawner.model.report import Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import NodeResources, Requested
from gpushare_spawner.spawner.queue.snapshot import MILLICORES, guaranteed_resources


@dataclass(frozen=True)
class Machine:
    """One machine. ``total``: its CPU and memory; any number of servers can run on it."""

    total: NodeResources

    @classmethod
    def here(cls) -> Machine:
        """Return the machine that this process runs on."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(NodeResources.of_empty_node((os.cpu_count() or 1) * MILLICORES, memory))

    def left(self, report: Report, templates: Iterable[Template]) -> NodeResources:
        """Return what the sessions of a report leave: what their templates guarantee now is taken.

        A session of a template that is gone counts nothing, and so does a server without a GPU: the report has none.
        """
        guaranteed = {template.name: guaranteed_resources(template) for template in templates}
        taken = (guaranteed[session.template] for session in report.sessions if session.template in guaranteed)
        return self.total.less(Requested.total(taken))
