"""Stands in for The Littlest JupyterHub where it is not installed: the few names that our files use, and a main config
file that reads jupyterhub_config.d as TLJH's does."""
