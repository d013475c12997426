"""The hub's data on the cluster: pods, agents' reports, and the free CPU and memory of nodes."""
