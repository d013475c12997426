"""``gpushare status``: this notebook server's GPU share, in its terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time

from gpushare_spawner.notebook.ask import ask
from gpushare_spawner.wording.share_status import page

CLEAR = "\x1b[H\x1b[2J"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print a JSON object (with --watch one on each line)")
    parser.add_argument("--watch", action="store_true", help="print it again every second, until Ctrl-C")
    parser.add_argument("--socket", metavar="PATH", help="the session's socket (default: $GPUSHARE_SOCKET)")


def run(options: argparse.Namespace) -> int:
    """Print the status. Returns 0 if it is known or there is no share, 1 if the agent is unavailable."""
    try:
        while True:
            status = ask(options.socket)
            if options.json:
                print(json.dumps(status.as_json()), flush=True)
            else:
                print((CLEAR if options.watch and sys.stdout.isatty() else "") + page(status, time.time()), flush=True)
            if not options.watch or not status.shared:
                return 1 if status.problem else 0
            time.sleep(1)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `gpushare status --watch | head`
        sys.stderr.close()
        return 0
