# The Littlest JupyterHub: copy only this file to /opt/tljh/config/jupyterhub_config.d. It sets the spawner
# gpushare-tljh and adds the idle culler and the dashboard. The idle culler replaces TLJH's own.
# Write your settings, like c.GPUShareMixin.queue_timeout = 300, to a file with a later name in that folder.
from gpushare_spawner.shipped import shipped

for _gpushare_file in ("10-gpushare.py", "20-gpushare-service.py"):
    # the files of the installed version: after an upgrade of the package nothing has to be copied
    load_subconfig(str(shipped(f"jupyterhub_config.d/{_gpushare_file}")))
