"""The kubelet's gRPC interfaces: device plugins, pod resources, plugins of dynamic resource allocation.

``generate.py`` makes the ``*_pb2*`` files from the ``.proto`` files in this folder.
"""
