"""The GPUs of this machine: the driver's figures, and the arbitration of each GPU."""
