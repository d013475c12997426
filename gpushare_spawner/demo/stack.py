"""Commands and environments of a hub with shared GPUs on one machine; the demo and the end-to-end tests start them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_spawner.demo.folder import DemoFolder
from gpushare_spawner.demo.gpus import simulated_environment


@dataclass(frozen=True)
class Stack:
    """Folders, ports and settings of the demo. The hub starts its proxy, its service and the notebook servers."""

    folder: DemoFolder
    config_files: Path
    """The folder jupyterhub_config.d."""
    ip: str
    port: int
    """The proxy's public port; the other three are for 127.0.0.1 only."""
    hub_port: int
    proxy_port: int
    service_port: int
    simulated: bool
    password: str = ""
    """For all names; empty: none is asked for, so that every account of this machine can run programs as its owner."""
    cull_every: float = 5.0
    """Seconds between two rounds of the idle culler."""
    settings: dict[str, str] = field(default_factory=dict)
    """Further environment variables for the agent and the hub."""

    @property
    def url(self) -> str:
        """The address that users open."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.ip, self.ip)
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    def agent(self) -> tuple[list[str], dict[str, str]]:
        """Return the agent's command and environment. Raises FileNotFoundError if the simulated driver is not built."""
        command = [sys.executable, "-m", "gpushare_spawner.cli", "agent"]
        command += ["--state-dir", str(self.folder.agent_state), "--control-socket", str(self.folder.control_socket)]
        more = simulated_environment(self.folder.root) if self.simulated else {}
        return command, {**os.environ, **self.settings, **more}

    def hub(self) -> tuple[list[str], dict[str, str]]:
        """Return the hub's command and environment."""
        config = Path(__file__).with_name("jupyterhub_config.py")
        command = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
        programs = [*([self.folder.programs] if self.simulated else []), Path(sys.executable).parent]
        return command, {
            **os.environ,
            **self.settings,
            # the programs of this Python environment, also for the hub's children; nvidia-smi of simulated GPUs first
            "PATH": os.pathsep.join([*map(str, programs), os.environ.get("PATH", os.defpath)]),
            "GPUSHARE_CONFIG_D": str(self.config_files),
            "GPUSHARE_CONTROL": str(self.folder.control_socket),
            "GPUSHARE_TEMPLATES": str(self.folder.templates),
            "GPUSHARE_SERVICE_URL": f"http://127.0.0.1:{self.service_port}",
            "GPUSHARE_HISTORY": f"sqlite:///{self.folder.root}/gpushare-history.sqlite",
            "GPUSHARE_SERVICE_OPTIONS": f"--cull-every {self.cull_every:g}",
            "GPUSHARE_DEMO_DIR": str(self.folder.root),
            "GPUSHARE_DEMO_IP": self.ip,
            "GPUSHARE_DEMO_PASSWORD": self.password,
            "GPUSHARE_DEMO_PORTS": f"{self.port},{self.hub_port},{self.proxy_port}",
        }
