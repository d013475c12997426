"""The JupyterHub service: the idle culler and the dashboard."""
