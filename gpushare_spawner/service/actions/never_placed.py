"""Whether a server of a template can ever be placed, as far as the agents' reports say.

The reports name models, units and number of GPUs. The spawner also looks at CPU, memory, taints and labels of nodes:
the service has no right to read nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import LedgerFeed, PlacementRequest, suitable_models
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.wording.spawn import refusals

log = logging.getLogger("gpushare.service.actions")


def never_placed(template: Template, snapshots: Sequence[NodeSnapshot]) -> str:
    """Return why no node can take the template's share even if nothing runs there, as a sentence; empty: one can.

    Empty too while an agent does not answer: its node might. And after an error in placement, which is logged.
    """
    if template.gpu is None:
        return ""
    # sessions pass: only the GPUs count
    reports = [one.report.model_copy(update={"sessions": ()}) for one in snapshots if one.report is not None]
    if len(reports) < len(snapshots):
        return ""
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    request = PlacementRequest(template.gpu.share, models=suitable_models(template.gpu, kinds), template=template.name)
    try:
        why = LedgerFeed().follow(reports).why_unplaceable(request)
    except Exception:
        log.exception("Whether a GPU will ever do for template %s is unknown", template.name)
        return ""
    return "" if why.may_pass else refusals.capacity(why)
