"""What lies between a template and a running session: one module for each sharing layer."""
