"""Memory: the limit of a session, budgets of host memory, and the driver's figures for each process."""
