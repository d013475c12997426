"""The service's access to a cluster: reports from ConfigMaps, sessions from pods, idle actions as patches of pods."""
