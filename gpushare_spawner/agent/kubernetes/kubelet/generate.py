"""Make the Python stubs of the kubelet's interfaces: ``python -m gpushare_spawner.agent.kubernetes.kubelet.generate``.

The stubs reject any grpcio or protobuf older than the version that generated them. The current stubs were generated
with grpcio-tools 1.74.0 in a separate environment, so they work with all later versions. If a newer version generates
them, pyproject.toml needs new lower bounds.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]


def generate(target: Path = ROOT) -> int:
    """Write the stubs below `target`, as in the repository. Return protoc's exit status."""
    from grpc_tools import protoc

    outputs = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    protos = [str(path) for path in sorted(HERE.glob("*.proto"))]
    status: int = protoc.main(["protoc", f"--proto_path={ROOT}", *outputs, *protos])
    return status


if __name__ == "__main__":
    sys.exit(generate())
