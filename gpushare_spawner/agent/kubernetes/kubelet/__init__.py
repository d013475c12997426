"""The kubelet's gRPC interfaces: device plugins (v1beta1) and pods' resources (v1).

The ``*_pb2*`` files are made from the ``.proto`` files beside them, by ``generate.py``.
"""
