# Shared GPUs: the spawner. For jupyterhub_config.d of zero-to-jupyterhub, and for load_subconfig in a config file of
# your own. For The Littlest JupyterHub copy tljh/gpushare-tljh.py instead, which reads this file.
# All settings: docs/reference/settings.md.
import os
import sys

# A hub in a cluster starts pods; GPUSHARE_CONTROL says that the GPUs are on the hub's own machine all the same.
_gpushare_in_cluster = bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not os.environ.get("GPUSHARE_CONTROL")

# A spawner that you chose yourself stays; gpushare_spawner.spawner.local.mixin.GPUShareMixin makes it a sharing one.
# (load_subconfig shows this file nothing of what was set before it: there, choose yours afterwards.)
# What zero-to-jupyterhub chooses before it reads this file is replaced: ours is a KubeSpawner, with all its settings.
_gpushare_replaced = ("kubespawner", "kubespawner.KubeSpawner", "kubespawner.spawner.KubeSpawner")
if "tljh.configurer" in sys.modules:
    # TLJH always chooses a spawner before it reads this file, and this file cannot see it
    c.JupyterHub.spawner_class = "gpushare-tljh"
elif "spawner_class" not in c.JupyterHub or (_gpushare_in_cluster and c.JupyterHub.spawner_class in _gpushare_replaced):
    c.JupyterHub.spawner_class = (
        "gpushare_spawner.spawner.kubernetes.spawner.GPUShareSpawner" if _gpushare_in_cluster else "gpushare-local"
    )

# Settings, in a cluster of c.GPUShareSpawner:
# c.GPUShareMixin.templates_dir = "/etc/gpushare/templates"
# c.GPUShareMixin.agent_socket = "/run/gpushare/control.sock"
# c.GPUShareMixin.queue_timeout = 600
