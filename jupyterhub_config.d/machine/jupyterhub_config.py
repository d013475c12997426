# A hub on one machine: copy this file to /etc/jupyterhub/jupyterhub_config.py and adapt it to your machine. See
# docs/guides/single-machine.md. The files in /etc/jupyterhub/jupyterhub_config.d are read at the end.
from pathlib import Path

c = get_config()

# All users of the machine may log in with their password. It is better to name a group:
# c.PAMAuthenticator.allowed_groups.
c.Authenticator.allow_all = True
c.Authenticator.admin_users = set()

# Port 8000, from this machine only, without TLS: put a proxy with TLS in front of it. "http://:8000" listens on all
# addresses; the machine must then know its own name (/etc/hosts).
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.db_url = "sqlite:////var/lib/jupyterhub/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = "/var/lib/jupyterhub/cookie_secret"
c.ConfigurableHTTPProxy.pid_file = "/var/lib/jupyterhub/proxy.pid"
c.ConfigurableHTTPProxy.command = ["/opt/jupyterhub/bin/configurable-http-proxy"]
# servers keep running while the hub restarts
c.JupyterHub.cleanup_servers = False

# the users' Python environment is separate from the hub's
c.Spawner.cmd = ["/opt/notebook/bin/jupyterhub-singleuser"]
c.Spawner.default_url = "/lab"
c.SystemdSpawner.extra_paths = ["/opt/notebook/bin"]
c.SystemdSpawner.default_shell = "/bin/bash"

for _file in sorted(Path("/etc/jupyterhub/jupyterhub_config.d").glob("*.py")):
    load_subconfig(str(_file))

# after the config files, which set a spawner too: servers are systemd units, so their limits are enforced
c.JupyterHub.spawner_class = "gpushare-systemd"
