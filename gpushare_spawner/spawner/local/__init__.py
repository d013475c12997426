"""Spawners of processes, with shared GPUs of this machine's agent."""
