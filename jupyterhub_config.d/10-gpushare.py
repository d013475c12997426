# Shared GPUs: the spawner. For jupyterhub_config.d of zero-to-jupyterhub, and for load_subconfig in your own config
# file. For The Littlest JupyterHub copy tljh/gpushare-tljh.py instead, which reads this file.
# All settings: docs/reference/settings.md.
import os
import sys

from gpushare_spawner.spawner.hub import HUB_PAGES as _gpushare_pages

# A hub in a cluster starts pods, unless GPUSHARE_CONTROL says that the GPUs are on the hub's own machine.
_gpushare_in_cluster = bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not os.environ.get("GPUSHARE_CONTROL")

# A spawner class that you set before stays. To share GPUs with it, extend it with
# gpushare_spawner.spawner.local.mixin.GPUShareMixin. (With load_subconfig this file cannot see earlier settings: set
# your class after it.) The class that zero-to-jupyterhub sets is replaced: GPUShareSpawner is a KubeSpawner, with all
# its settings.
_gpushare_replaced = ("kubespawner", "kubespawner.KubeSpawner", "kubespawner.spawner.KubeSpawner")
if "tljh.configurer" in sys.modules:
    # TLJH always sets a spawner before it reads this file, and this file cannot see it
    c.JupyterHub.spawner_class = "gpushare-tljh"
elif "spawner_class" not in c.JupyterHub or (_gpushare_in_cluster and c.JupyterHub.spawner_class in _gpushare_replaced):
    c.JupyterHub.spawner_class = (
        "gpushare_spawner.spawner.kubernetes.spawner.GPUShareSpawner" if _gpushare_in_cluster else "gpushare-local"
    )

# The hub's page of a pending spawn says whether the spawn waits for a GPU, and that of a stopped server who stopped it.
# To use pages of your own, set c.JupyterHub.template_paths as a list.
if isinstance(c.JupyterHub.template_paths, list):
    c.JupyterHub.template_paths.append(_gpushare_pages)
else:
    # not a list yet: the hub joins it with its own folder, which has a page of the same name
    c.JupyterHub.template_paths.insert(0, _gpushare_pages)

# Settings, in a cluster of c.GPUShareSpawner:
# c.GPUShareMixin.templates_dir = "/etc/gpushare/templates"
# c.GPUShareMixin.agent_socket = "/run/gpushare/control.sock"
# c.GPUShareMixin.queue_timeout = 600
