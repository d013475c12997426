"""How the agent's control socket and the cluster's API server are asked."""
