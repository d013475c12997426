"""A `cull_arbiter_hook` for jupyterhub-idle-culler 2.0 and later, so that it can run together with this service.

In the file for jupyterhub-idle-culler's option ``--config``::

    from gpushare_spawner.service.idle_culler_hook import cull_arbiter

    c.IdleCuller.cull_arbiter_hook = cull_arbiter("/etc/gpushare/templates")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.templates import TemplateSource
from gpushare_spawner.templates.folder import default_folder


def cull_arbiter(templates_dir: Path | str | None = None) -> Callable[..., bool]:
    """Return the hook. ``templates_dir``: the hub's folder of templates, which is reread when it changes.

    With the hook, jupyterhub-idle-culler never culls servers of templates with a GPU, because it detects neither GPU
    work nor busy kernels, and this service stops them. It culls servers of other templates after their
    `idle.stop_after`, and never if that is not given or with `idle.dry_run`. The defaults, limits and quiet hours of
    `idle.yaml` apply, and the most generous of its groups. All other servers are culled after jupyterhub-idle-culler's
    own timeout.
    """
    templates = TemplateSource(Path(templates_dir) if templates_dir is not None else default_folder())

    def hook(*, inactive: timedelta | None, inactive_limit: float, server: Mapping[str, Any], **_: Any) -> bool:
        """Return whether to cull a server. ``inactive_limit``: seconds; ``server``: its entry in the hub's API."""
        if inactive is None:
            return False
        options = server.get("user_options")
        name = options.get("profile") if isinstance(options, Mapping) else None
        each = templates()
        # the hook does not get the user's groups
        template = each.of_user(name, "") if isinstance(name, str) else None
        if template is not None and each.quiet_until(Tier.STOPPED, time.time()) > time.time():
            return False
        if template is None:
            return inactive.total_seconds() >= inactive_limit
        idle = template.idle
        if template.gpu is not None or idle.stop_after is None or idle.dry_run:
            return False
        return inactive.total_seconds() >= idle.stop_after

    return hook
