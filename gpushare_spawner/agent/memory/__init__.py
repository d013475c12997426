"""Memory: the limit of a session, budgets of host memory, and what the driver shows for each process."""
