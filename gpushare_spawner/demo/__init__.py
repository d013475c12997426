"""``gpushare demo``: runs the agent, a hub, its proxy and the service on one machine, from a checkout, until Ctrl-C."""
