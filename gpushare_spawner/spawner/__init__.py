"""The JupyterHub side: spawners that share GPUs, and the form."""
