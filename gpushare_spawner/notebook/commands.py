"""``gpushare status``, ``gpushare keep`` and ``gpushare release``, in the notebook server's terminal.

``keep`` and ``release`` do the same as the buttons in JupyterLab.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.share_status import CellsStatus
from gpushare_spawner.notebook.client import KERNEL, AgentUnavailable, ask, ask_cells, process_name
from gpushare_spawner.notebook.session_client import ServiceAsk, ask_service
from gpushare_spawner.wording.layers import NO_SHARE, wrong_keep_time
from gpushare_spawner.wording.share_status import cells_page, page

CLEAR = "\x1b[H\x1b[2J"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print a JSON object (with --watch one on each line)")
    parser.add_argument(
        "--cells", action="store_true", help="print the GPU time, memory and waits of each cell instead"
    )
    parser.add_argument("--watch", action="store_true", help="print it again every second, until Ctrl-C")
    parser.add_argument("--socket", metavar="PATH", help="the session's socket (default: $GPUSHARE_SOCKET)")


def run(options: argparse.Namespace) -> int:
    """Print the status. Return 0 if it is known or there is no share, 1 if the agent is unavailable."""
    try:
        while True:
            answer, text, again = _cells(options) if options.cells else _share(options)
            if options.json:
                print(json.dumps(answer), flush=True)
            else:
                print((CLEAR if options.watch and sys.stdout.isatty() else "") + text, flush=True)
            if not options.watch or not again:
                return 1 if answer["problem"] and again else 0
            time.sleep(1)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `gpushare status --watch | head`
        sys.stderr.close()
        return 0


def _share(options: argparse.Namespace) -> tuple[dict[str, Any], str, bool]:
    """Return the status as data and as text, and whether it can change."""
    status = ask(options.socket)
    return status.as_json(), page(status, time.time()), status.shared


def _cells(options: argparse.Namespace) -> tuple[dict[str, Any], str, bool]:
    """Return the cells as data and as text, and whether they can change."""
    try:
        cells, problem = ask_cells(options.socket), ""
    except AgentUnavailable as error:
        cells, problem = CellsStatus(), str(error)
    names = {pid: process_name(pid) for pid in {cell.pid for cell in cells.cells}}
    # an ended kernel's pid can be that of another process now
    kernels = {pid: name for pid, name in names.items() if name.startswith(KERNEL)}
    text = problem or cells_page(cells, kernels, time.time())
    return {"problem": problem, **asdict(cells)}, text, problem != NO_SHARE


END = "end"


def configure_keep(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gpushare keep``."""
    parser.add_argument(
        "time",
        metavar="TIME",
        nargs="?",
        help=f"how long: 4h, 90m; '{END}' ends the keep; without it: print how many keeps are left, and for how long",
    )
    configure_release(parser)


def configure_release(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gpushare release``."""
    parser.add_argument("--json", action="store_true", help="print a JSON object: done, text")
    parser.add_argument("--socket", metavar="PATH", help="the session's socket (default: $GPUSHARE_SOCKET)")


def keep(options: argparse.Namespace) -> int:
    """Keep the share, end the keep, or print the keeps that are left.

    Return 0 on success, 1 on failure, and 2 for a time that cannot be parsed.
    """
    try:
        request = _keep_of(options.time)
    except ValueError:
        # WrongAsk for a time of less than a second, or of millions of years
        print(f"gpushare: {wrong_keep_time(options.time, END)}", file=sys.stderr)
        return 2
    return _ask(request, options)


def release(options: argparse.Namespace) -> int:
    """Release the share now. Return 0 on success, 1 on failure."""
    return _ask(ServiceAsk.of(AskKind.RELEASE), options)


def _keep_of(time: str | None) -> ServiceAsk:
    if time is None:
        return ServiceAsk.of(AskKind.KEEPS)
    if time == END:
        return ServiceAsk.of(AskKind.END_KEEP)
    # not at the top: it imports pydantic, which `gpushare status` does not need
    from gpushare_spawner.model.quantity import parse_seconds

    return ServiceAsk.of(AskKind.KEEP, parse_seconds(time))


def _ask(request: ServiceAsk, options: argparse.Namespace) -> int:
    try:
        answer = ask_service(request, options.socket)
    except AgentUnavailable as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"done": answer.done, "text": answer.text}) if options.json else answer.text)
    return 0 if answer.done else 1
