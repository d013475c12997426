"""CPU priority of the agent: a lease must not wait behind notebooks that keep all cores busy."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct

log = logging.getLogger(__name__)

NICE = -10
SLICE_NS = 200_000
"""The kernel runs a process with a short slice sooner after it wakes up, and for less time at once."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period."""


def prefer_this_thread() -> None:
    """Raise the priority of this thread, and of those that it starts later, as far as the rights and the kernel go.

    Nice needs root or CAP_SYS_NICE. A slice needs no rights; kernels before 6.12 ignore it.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) > NICE:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except OSError as error:
        log.debug("cannot raise the agent's priority: %s", error.strerror)
    _shorten_slice()


def _shorten_slice() -> None:
    number = _SET_ATTRIBUTES.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(0), wanted, ctypes.c_uint(0)) != 0:
        log.debug("cannot shorten the agent's scheduler slice: %s", os.strerror(ctypes.get_errno()))
