"""GPUs as dynamic resource allocation (DRA) devices: the agent as a DRA driver (``--kubernetes dra``)."""
