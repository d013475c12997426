import os

CONFIG_DIR = os.path.join(os.environ.get("TLJH_INSTALL_PREFIX", "/opt/tljh"), "config")
