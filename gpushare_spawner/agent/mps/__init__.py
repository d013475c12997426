"""NVIDIA MPS on one machine: the agent runs a control daemon for each GPU that sessions share by MPS."""
