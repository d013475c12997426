"""Ends the service with its hub, because the service of a killed hub would block the port of the next hub's service.

This module runs before all other imports, so it imports only the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

log = logging.getLogger("gpushare.service")

EVERY = 1.0
"""Seconds between checks of whether the hub still runs, because a kernel without PR_SET_PDEATHSIG sends no signal."""
ENDED = "The hub that started this service has ended; the service ends too"
_PR_SET_PDEATHSIG = 1
"""From include/uapi/linux/prctl.h."""
_PARENT = os.getppid()


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--end-with-hub",
        nargs="?",
        type=int,
        const=_PARENT,
        metavar="PID",
        help="end when the process that started the service ends, so that a killed hub leaves no service behind; PID: "
        "the hub's process, which can have ended before the service reads this",
    )


def end_with_hub(arguments: Sequence[str]) -> None:
    """Have the kernel send SIGTERM when the hub ends, if the service's arguments request it.

    If the hub has already ended, end this process, because the kernel sends the signal only for an end after this call.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    try:
        hub = parser.parse_known_args(arguments)[0].end_with_hub
    except argparse.ArgumentError:
        return  # the command's own parser reports the error
    if hub is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != hub:
        sys.exit(ENDED)


async def wait_for_end(hub: int) -> None:
    """Return when the hub, this process's parent, has ended."""
    while os.getppid() == hub:
        await asyncio.sleep(EVERY)
    log.warning(ENDED)
