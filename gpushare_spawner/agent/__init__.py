"""The agent of a GPU machine: finds GPUs, keeps sessions, arbitrates, reports."""
