"""Sharing layers: pure renderers from template and placement to a server's environment or pod. One module each."""
