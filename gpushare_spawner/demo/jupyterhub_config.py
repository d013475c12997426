"""The hub's main configuration file in the demo: the fragments of jupyterhub_config.d in order, as TLJH and z2jh do."""

from __future__ import annotations

import os
from pathlib import Path

for fragment in sorted(Path(os.environ["GPUSHARE_CONFIG_D"]).glob("*.py")):
    load_subconfig(str(fragment))  # type: ignore[name-defined]  # noqa: F821
