# The Littlest JupyterHub: copy this file, and no other one, to /opt/tljh/config/jupyterhub_config.d. It chooses the
# spawner gpushare-tljh and adds the idle culler and the dashboard, which take the place of TLJH's own culler.
# Settings of yours go into a file of a later name there, like c.GPUShareMixin.queue_timeout = 300.
from gpushare_spawner.shipped import shipped

for _gpushare_file in ("10-gpushare.py", "20-gpushare-service.py"):
    # those of the installed version, so that an upgrade of the package is all that is needed
    load_subconfig(str(shipped(f"jupyterhub_config.d/{_gpushare_file}")))
