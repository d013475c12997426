"""The hub's main config file in the demo: loads the config files of jupyterhub_config.d in order, like TLJH."""

from __future__ import annotations

import os
from pathlib import Path

for config_file in sorted(Path(os.environ["GPUSHARE_CONFIG_D"]).glob("*.py")):
    load_subconfig(str(config_file))  # type: ignore[name-defined]  # noqa: F821
