"""What a user of the demo finds at home."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("gpu-sharing.ipynb")


def furnish(spawner: Any) -> None:
    """A hook for `Spawner.pre_spawn_hook`: put into the home, where it is not there yet, what the demo needs."""
    home = Path(spawner.home_dir_template.format(username=spawner.user.name))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    notebook = home / NOTEBOOK.name
    if not notebook.exists():
        shutil.copyfile(NOTEBOOK, notebook)
    lab = home / ".jupyter" / "labconfig" / "page_config.json"
    if not lab.exists():
        # JupyterLab asks every new user whether it may fetch news; here every user is new
        lab.parent.mkdir(parents=True, exist_ok=True)
        lab.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    profile = home / ".profile"
    if not profile.exists():
        # JupyterLab's terminals are login shells, which set PATH anew; `gpushare` must be found in them
        profile.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
