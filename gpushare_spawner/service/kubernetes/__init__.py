"""The service's side of a cluster: reports from ConfigMaps, sessions from pods, idle actions as patches of pods."""
