"""Errors that the driver reports of a GPU (Xid), while it goes on answering as if all were well.

Numbers and their meaning: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pynvml

log = logging.getLogger(__name__)

HARMLESS = frozenset({13, 31, 43, 45, 63, 68, 94, 109})
"""Xids after which the GPU works as before. A program's own mistakes: 13 (exception in a kernel), 31 (address fault),
43 (its channel was reset), 45 (it was killed), 68 (video), 109 (a context switch took too long). What the GPU has dealt
with: 63 (a memory row is replaced at the next reset), 94 (a memory error that ended one program)."""
MAX_AT_ONCE = 100


class XidEvents:
    """Collects Xids. Calls take milliseconds at most. A driver without events is one that never reports any."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self.last: dict[str, int] = {}
        """UUID of a GPU -> the Xid that broke it. It stays: the GPU needs a reset, which ends everything on it."""
        self._events: object | None = None
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            log.info("the driver does not report GPU errors as events: %s", error)
            return
        for uuid in uuids:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError as error:
                log.info("errors of GPU %s are not reported as events: %s", uuid, error)

    def collect(self) -> None:
        """Take in what was reported since the last call."""
        for _ in range(MAX_AT_ONCE):
            if self._events is None:
                return
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                uuid, xid = str(pynvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)
            except pynvml.NVMLError_Timeout:
                return
            except pynvml.NVMLError as error:
                # a GPU that is lost fails every wait from now on; that it is lost is seen without events too
                log.debug("events of GPUs: %s", error)
                return
            if xid in HARMLESS:
                log.info("GPU %s: Xid %d, of a program and not of the GPU", uuid, xid)
            elif uuid not in self.last:
                self.last[uuid] = xid

    def close(self) -> None:
        """Listen no more."""
        if self._events is not None:
            try:
                pynvml.nvmlEventSetFree(self._events)
            except pynvml.NVMLError as error:
                log.debug("events of GPUs: %s", error)
            self._events = None
