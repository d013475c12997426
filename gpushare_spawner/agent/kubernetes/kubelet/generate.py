"""Make the Python stubs of the kubelet's interfaces: ``python -m gpushare_spawner.agent.kubernetes.kubelet.generate``.

The stubs refuse a grpcio or protobuf older than the version that made them. The present ones were made with
grpcio-tools 1.74.0 in an environment of its own, so they run with all later versions. A newer version needs new lower
bounds in pyproject.toml.
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
