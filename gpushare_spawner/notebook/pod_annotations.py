"""The share of a notebook server under another sharing layer, from the annotations of its pod.

Without an agent, notices and messages reach the user through these annotations. The kubelet provides the annotations as
files, see `model.kubernetes.SESSION_FILES`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from gpushare_spawner.model.kubernetes.annotations import LAYER, AnnotationProblem, SessionAnnotations, pod_session
from gpushare_spawner.model.kubernetes.objects import SESSION_FILES
from gpushare_spawner.model.layers import LAYER_VARIABLE
from gpushare_spawner.model.share_status import ANNOTATIONS_VARIABLE, ControlsStatus, PendingAction, ShareStatus
from gpushare_spawner.wording.amounts import reason
from gpushare_spawner.wording.layers import annotations_unreadable

_CURRENT = "..data"
"""A symbolic link to a folder with a new name for each version of the files. The kubelet replaces the link after
writing new files, so all files change together (its AtomicWriter)."""
_ATTEMPTS = 3
"""Attempts to read files that the kubelet replaces during the read."""


class PodAnnotations:
    """The pod's annotations. The files are reread only after a change."""

    def __init__(self, folder: Path, layer: str, clock: Callable[[], float] = time.time) -> None:
        """``layer``: the sharing layer's name; ``clock``: seconds since the epoch."""
        self._folder = folder
        self._layer = layer
        self._clock = clock
        self._read: tuple[str, SessionAnnotations] | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the annotations for the server with this environment; None if its pod has no such files."""
        folder, layer = environment.get(ANNOTATIONS_VARIABLE), environment.get(LAYER_VARIABLE)
        return cls(Path(folder), layer) if folder and layer else None

    def status(self) -> ShareStatus:
        """Return the current share. Raises nothing."""
        try:
            session = self._session()
        except (OSError, UnicodeDecodeError, AnnotationProblem) as error:
            return ShareStatus(problem=annotations_unreadable(reason(error)))
        return share_status(session, self._clock())

    def _session(self) -> SessionAnnotations:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(FileNotFoundError):  # replaced during the read
                return self._current()
        return self._current()

    def _current(self) -> SessionAnnotations:
        version = os.readlink(self._folder / _CURRENT)
        if self._read is None or self._read[0] != version:
            texts = {name: (self._folder / version / file).read_text() for name, file in SESSION_FILES.items()}
            present = {name: text for name, text in texts.items() if text}
            self._read = version, pod_session(present, {LAYER: self._layer})
        return self._read[1]


def share_status(session: SessionAnnotations, now: float) -> ShareStatus:
    """Return the status of a session that no agent measures. ``now``: seconds since the epoch."""
    return ShareStatus(
        layer=str(session.layer),
        layer_gpus=len(session.gpus),
        at=now,
        share_units=session.share_units,
        tier=session.tier,
        effective_units=session.effective_units,
        guaranteed_units=session.effective_units,
        notice=None if session.notice is None else PendingAction.of(session.notice),
        controls=ControlsStatus.of(session.controls, session.messages, now),
    )
