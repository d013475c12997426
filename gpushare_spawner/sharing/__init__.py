"""What lies between a template and a running session.

Sharing layers, the folder of templates, the agent's control socket.
"""
