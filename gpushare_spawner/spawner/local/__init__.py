"""Spawners of processes that share GPUs through this machine's agent."""
