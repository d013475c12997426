"""GPUs as devices of dynamic resource allocation (DRA): the agent as a DRA driver (``--kubernetes dra``)."""
