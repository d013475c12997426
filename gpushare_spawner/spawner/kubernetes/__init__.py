"""Spawners of pods, with shared GPUs of a cluster."""
