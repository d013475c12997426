"""``python -m gpushare_spawner.agent.probe SOCKET``: checks that the agent answers, for the probes of its pod.

The request uses the control socket, which users cannot reach. The metrics port is not suitable for probes: clients
could take all of its connections, and the kubelet would then kill the agent.
"""

from __future__ import annotations

import socket
import sys

ANSWER_WITHIN = 8.0
"""Seconds within which the agent must answer."""


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 if the agent answers, or else 1, with a sentence on standard error."""
    if len(arguments) != 1:
        print("usage: python -m gpushare_spawner.agent.probe CONTROL_SOCKET", file=sys.stderr)
        return 2
    (path,) = arguments
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(ANSWER_WITHIN)
            control.connect(path)
            control.sendall(b'{"op": "report"}\n')
            answered = control.recv(1) == b"{"
    except OSError as error:
        print(f"the agent does not answer on {path}: {error.strerror or error}", file=sys.stderr)
        return 1
    if not answered:
        print(f"the agent ended the connection on {path} without an answer", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
