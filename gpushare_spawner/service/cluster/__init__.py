"""The service's side of a cluster: agents' reports from ConfigMaps, sessions from pods, steps as patches of pods."""
