"""What a user of the demo finds at home."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("gpu-sharing.ipynb")


def furnish(spawner: Any) -> None:
    """A hook for `Spawner.pre_spawn_hook`: put the demo's notebook into the home, if it is not there yet."""
    home = Path(spawner.home_dir_template.format(username=spawner.user.name))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    notebook = home / NOTEBOOK.name
    if not notebook.exists():
        shutil.copyfile(NOTEBOOK, notebook)
