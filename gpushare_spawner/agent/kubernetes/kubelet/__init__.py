"""The kubelet's gRPC interfaces: device plugins, pod resources, dynamic resource allocation plugins.

``generate.py`` generates the ``*_pb2*`` files from the ``.proto`` files in this folder.
"""
