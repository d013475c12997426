"""Clients of the agent's control socket and of the cluster's API server."""
