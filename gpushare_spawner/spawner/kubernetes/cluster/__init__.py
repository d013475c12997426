"""What the hub sees of the cluster: pods, reports of agents, and the free CPU and memory of nodes."""
