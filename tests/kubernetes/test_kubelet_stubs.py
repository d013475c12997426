"""The stubs of the kubelet's interfaces are those of the .proto files beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from gpushare_spawner.agent.kubernetes import kubelet
from gpushare_spawner.agent.kubernetes.kubelet import (
    deviceplugin_pb2,
    dra_health_pb2,
    dra_pb2,
    pluginregistration_pb2,
    podresources_pb2,
)

FOLDER = Path(kubelet.__file__).parent


@pytest.mark.parametrize("stubs", [deviceplugin_pb2, dra_health_pb2, dra_pb2, pluginregistration_pb2, podresources_pb2])
def test_stubs_and_protos_say_the_same(stubs: object, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    described = stubs.DESCRIPTOR  # type: ignore[attr-defined]
    output = tmp_path / "descriptors"
    assert (
        protoc.main(["protoc", f"--proto_path={FOLDER.parents[3]}", f"--descriptor_set_out={output}", described.name])
        == 0
    )
    (compiled,) = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file
    stub = descriptor_pb2.FileDescriptorProto()
    described.CopyToProto(stub)
    assert shape(compiled) == shape(stub)


def shape(file: descriptor_pb2.FileDescriptorProto) -> set[object]:
    """What goes over the wire; how it is called in JSON and which options the compiler noted is left out."""
    found: set[object] = {file.package}
    for message in [*file.message_type, *(nested for outer in file.message_type for nested in outer.nested_type)]:
        found.add(message.name)
        found |= {
            (message.name, each.name, each.number, each.type, each.label, each.type_name) for each in message.field
        }
    for service in file.service:
        for method in service.method:
            streams = method.client_streaming, method.server_streaming
            found.add((service.name, method.name, method.input_type, method.output_type, streams))
    return found
