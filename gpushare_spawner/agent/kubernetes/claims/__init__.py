"""GPUs as devices of dynamic resource allocation: the agent as a DRA driver (``--kubelet dra``)."""
