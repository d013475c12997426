# Shared GPUs: the spawner. Works in jupyterhub_config.d of The Littlest JupyterHub and of zero-to-jupyterhub, and with
# load_subconfig in a config file of your own. docs/spawner.md has every setting.

# A spawner that you chose yourself stays; make it a sharing one with gpushare_spawner.spawner.mixin.GPUShareMixin.
if "spawner_class" not in c.JupyterHub:
    c.JupyterHub.spawner_class = "gpushare-local"

# c.GPUShareMixin.templates_dir = "/etc/gpushare/templates"
# c.GPUShareMixin.agent_socket = "/run/gpushare/control.sock"
# c.GPUShareMixin.queue_timeout = 600
