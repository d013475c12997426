"""Memory of GPUs and of the host: limits of sessions, and budgets."""
