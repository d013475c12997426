"""Spawners of pods that share the GPUs of a cluster."""
