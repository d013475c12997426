from pathlib import Path
from typing import Any

import yaml

from tljh.config import CONFIG_DIR

CULL = {"enabled": True, "timeout": 600, "every": 60, "concurrency": 5, "users": False, "max_age": 0}


def load_config() -> dict[str, Any]:
    file = Path(CONFIG_DIR) / "config.yaml"
    said = yaml.safe_load(file.read_text()) if file.exists() else {}
    cull = {**CULL, "remove_named_servers": False, **said.get("services", {}).get("cull", {})}
    return {**said, "services": {"cull": cull}}
