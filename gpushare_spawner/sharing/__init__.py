"""What lies between a template and a running session: sharing layers, the folder of templates, the agent's control socket."""
