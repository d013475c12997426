"""The configuration of a hub as zero-to-jupyterhub has it: its own settings, then jupyterhub_config.d/ executed.

The hub is a process on the tests' machine, so its addresses are loopback ones, and the proxy is a process beside it.
"""

import json
import os
import sys
from pathlib import Path

c = get_config()  # type: ignore[name-defined]  # noqa: F821

_config_files = Path(__file__).resolve().parents[2] / "jupyterhub_config.d"
_folder = Path(os.environ["HUB_FOLDER"])
_addresses = json.loads(os.environ["HUB_ADDRESSES"])

c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.JupyterHub.hub_bind_url = _addresses["hub"]
c.JupyterHub.hub_connect_url = _addresses["hub"]
c.JupyterHub.bind_url = _addresses["public"]
c.ConfigurableHTTPProxy.api_url = _addresses["proxy"]
c.ConfigurableHTTPProxy.should_start = False
c.JupyterHub.cleanup_servers = False
c.JupyterHub.db_url = f"sqlite:///{_folder}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = str(_folder / "cookie_secret")
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True

c.KubeSpawner.namespace = os.environ["POD_NAMESPACE"]
c.KubeSpawner.port = int(_addresses["port of servers"])
c.KubeSpawner.image = "standin/notebook:1"
c.KubeSpawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.KubeSpawner.start_timeout = 100
c.KubeSpawner.http_timeout = 60
c.KubeSpawner.args = [os.environ["SERVER_ARGUMENT"], *(["--allow-root"] if os.geteuid() == 0 else [])]

# an administrator's program: the test
c.JupyterHub.services = [{"name": "e2e", "api_token": os.environ["HUB_TOKEN"]}]
c.JupyterHub.load_roles = [
    {
        "name": "e2e",
        "services": ["e2e"],
        "scopes": ["admin:users", "admin:servers", "access:servers", "list:services", "read:services"],
    }
]

for _name in ("10-gpushare.py", "20-gpushare-service.py"):
    exec(compile((_config_files / _name).read_text(), _name, "exec"))

# The config files take this process for a pod. There is no service account in it, or that of a pod that runs the tests.
for _environment in (os.environ, *(service.get("environment", {}) for service in c.JupyterHub.services)):
    _environment.pop("KUBERNETES_SERVICE_HOST", None)
