"""The annotations that a notebook server reads of its own pod, as files of a downwardAPI volume.

A session of another sharing layer can have no agent that sends it notices. The service writes them to the pod's
annotations all the same. The kubelet writes the files again after a change of an annotation: at once as a rule, and
within its sync period of about a minute in any case.
"""

from __future__ import annotations

from typing import Any

from gpushare_spawner.model.kubernetes.annotations import (
    EFFECTIVE_SHARE,
    NOTICE,
    SESSION,
    SHARE,
    TEMPLATE,
    TIER,
    TIER_SINCE,
)
from gpushare_spawner.model.kubernetes.control_annotations import EXEMPTION, KEEP, MESSAGE, MESSAGES
from gpushare_spawner.model.kubernetes.layer_session import GPU_COUNT
from gpushare_spawner.model.kubernetes.prefix import PREFIX

SESSION_FILES_FOLDER = "/var/run/gpushare-session"
"""Where the volume is mounted."""
SESSION_FILES = {
    name: name.removeprefix(PREFIX)
    for name in (
        SESSION, TEMPLATE, SHARE, GPU_COUNT, TIER, TIER_SINCE, EFFECTIVE_SHARE, NOTICE, KEEP, EXEMPTION, MESSAGE,
        MESSAGES,
    )
}  # fmt: skip
"""Names of files by annotation: what the user may see. The file of an absent annotation is empty."""


def session_files_volume() -> dict[str, Any]:
    """Return the source of the volume."""
    items = [
        {"path": file, "fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}
        for name, file in SESSION_FILES.items()
    ]
    return {"downwardAPI": {"items": items}}
