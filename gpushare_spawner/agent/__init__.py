"""The agent of a GPU machine: finds GPUs, manages sessions, arbitrates, reports."""
