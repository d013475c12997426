"""A CUDA program without the library that says what the library would, and says nothing of its managed memory.

Its arguments: the socket of its session, and the UUID of its GPU. The driver cannot suspend it, and fails on the way.
"""

from __future__ import annotations

import asyncio
import sys

from gpushare_spawner.model.frames import Feature, Kind, Role
from tests.agent.peers import Peer
from tests.agent.suspend_program import MIB, Machine

PLAIN = 500


async def main(socket: str, gpu: str) -> None:
    """Run until the connection ends."""
    machine = Machine()
    machine.context()
    machine.managed(8)
    machine.allocate(1, PLAIN)
    peer = Peer(socket)
    await peer.connect(Role.CUDA, Feature.SUSPEND)
    peer.send(Kind.MEMORY, 0, PLAIN * MIB, gpu=gpu)
    print("ready", flush=True)
    while (frame := await peer.receive(3600)) is not None:
        if frame.kind is Kind.SUSPEND:
            peer.send(Kind.SUSPEND_READY, frame.fields[0], 0, 0, 0, 1, 1, PLAIN * MIB)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
