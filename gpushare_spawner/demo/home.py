"""The files in the home of a user of the demo."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("gpu-sharing.ipynb")


def prepare_home(spawner: Any) -> None:
    """Write the files that the demo needs and the home lacks. A hook for `Spawner.pre_spawn_hook`."""
    home = Path(spawner.home_dir_template.format(username=spawner.user.name))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    notebook = home / NOTEBOOK.name
    if not notebook.exists():
        shutil.copyfile(NOTEBOOK, notebook)
    lab = home / ".jupyter" / "labconfig" / "page_config.json"
    if not lab.exists():
        # JupyterLab asks each new user whether it may fetch news; in the demo each user is new
        lab.parent.mkdir(parents=True, exist_ok=True)
        lab.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    profile = home / ".profile"
    if not profile.exists():
        # JupyterLab's terminals are login shells, which set PATH anew; `gpushare` must be on it
        profile.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
