from pathlib import Path

from tljh import configurer
from tljh.config import CONFIG_DIR
from tljh.user_creating_spawner import UserCreatingSpawner

c = get_config()  # type: ignore[name-defined]  # noqa: F821
c.JupyterHub.spawner_class = UserCreatingSpawner
c.SystemdSpawner.username_template = "jupyter-{USERNAME}"
said = configurer.load_config()
c.UserCreatingSpawner.user_groups = said.get("users", {}).get("extra_user_groups", {})
c.JupyterHub.services = []
if said["services"]["cull"]["enabled"]:
    c.JupyterHub.services.append({"name": "cull-idle", "admin": True, "command": ["jupyterhub-idle-culler"]})
for file in sorted(Path(CONFIG_DIR).glob("jupyterhub_config.d/*.py")):
    load_subconfig(str(file))  # type: ignore[name-defined]  # noqa: F821
