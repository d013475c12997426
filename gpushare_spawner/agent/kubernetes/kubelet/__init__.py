"""The kubelet's gRPC interfaces: device plugins, pods' resources, plugins of dynamic resource allocation.

The ``*_pb2*`` files are made from the ``.proto`` files beside them, by ``generate.py``.
"""
