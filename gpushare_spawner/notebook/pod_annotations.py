"""The share of a notebook server that another sharing layer gives a GPU, as the annotations of its own pod say it.

Where no agent serves the server, they are how notices and messages reach the user. The kubelet keeps them as files,
see `model.kubernetes.session_files`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from gpushare_spawner.model.kubernetes import (
    LAYER,
    MESSAGES,
    SESSION_FILES,
    AnnotationProblem,
    LayerSession,
    layer_session,
)
from gpushare_spawner.model.layers import LAYER_VARIABLE
from gpushare_spawner.model.share import IdleCause
from gpushare_spawner.model.share_status import (
    ANNOTATIONS_VARIABLE,
    AdminMessage,
    ControlsStatus,
    PendingAction,
    ShareStatus,
)
from gpushare_spawner.wording.amounts import reason
from gpushare_spawner.wording.layers import annotations_unreadable

_CURRENT = "..data"
"""A link to a folder whose name tells when the kubelet wrote the files. The kubelet replaces the link when it has
written new ones, so that they change together (its AtomicWriter)."""
_ATTEMPTS = 3
"""How often files are read that the kubelet replaces meanwhile."""


class PodAnnotations:
    """Reads the files again only after they have changed."""

    def __init__(self, folder: Path, layer: str, clock: Callable[[], float] = time.time) -> None:
        """``layer``: the sharing layer's name; ``clock``: seconds since the epoch."""
        self._folder = folder
        self._layer = layer
        self._clock = clock
        self._read: tuple[str, LayerSession] | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return those of the server with this environment; None: its pod has no such files."""
        folder, layer = environment.get(ANNOTATIONS_VARIABLE), environment.get(LAYER_VARIABLE)
        return cls(Path(folder), layer) if folder and layer else None

    def status(self) -> ShareStatus:
        """Return the share now. Raises nothing."""
        try:
            found = self._session()
        except (OSError, UnicodeDecodeError, AnnotationProblem) as error:
            return ShareStatus.unknown(annotations_unreadable(reason(error)))
        return share_status(found, self._clock())

    def _session(self) -> LayerSession:
        for attempt in range(_ATTEMPTS):
            version = os.readlink(self._folder / _CURRENT)
            if self._read is not None and self._read[0] == version:
                return self._read[1]
            try:
                found = self._read_all(self._folder / version)
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue  # replaced meanwhile
            self._read = version, found
            return found
        raise AssertionError("the last attempt returns or raises")

    def _read_all(self, folder: Path) -> LayerSession:
        texts = {name: (folder / file).read_text() for name, file in SESSION_FILES.items() if name != MESSAGES}
        newer = folder / SESSION_FILES[MESSAGES]
        if newer.exists():  # not in a pod that an older hub made
            texts[MESSAGES] = newer.read_text()
        return layer_session({LAYER: self._layer}, {name: text for name, text in texts.items() if text})


def share_status(found: LayerSession, now: float) -> ShareStatus:
    """Return the status of a session that no agent measures. ``now``: seconds since the epoch."""
    said = found.session
    notice, keep, exemption = said.notice, said.controls.keep, said.controls.exemption
    exempt = exemption is not None and (exemption.until is None or exemption.until > now)
    return ShareStatus(
        layer=str(found.layer),
        layer_gpus=len(said.gpus),
        at=now,
        share_units=said.share_units,
        tier=said.tier,
        effective_units=said.effective_units,
        guaranteed_units=said.effective_units,
        announced=None
        if notice is None
        else PendingAction(
            notice.tier, notice.at, notice.effective_units, notice.cause or IdleCause.IDLE, notice.after_seconds
        ),
        controls=ControlsStatus(
            keep_until=keep.until if keep is not None and keep.until > now else None,
            exempt=exempt,
            exempt_until=exemption.until if exemption is not None and exempt else None,
            messages=tuple(AdminMessage(message.text, message.at) for message in said.messages),
        ),
    )
