"""``gpushare``: one command, a subcommand for each part.

Each part's module offers ``configure(parser)`` and ``run(options) -> int``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from gpushare_spawner import __version__


def _agent() -> ModuleType:
    from gpushare_spawner.agent import command

    return command


def _service() -> ModuleType:
    from gpushare_spawner.service import command

    return command


def _templates() -> ModuleType:
    from gpushare_spawner.templates import command

    return command


def _status() -> ModuleType:
    from gpushare_spawner.notebook import status_command

    return status_command


def _doctor() -> ModuleType:
    from gpushare_spawner.doctor import command

    return command


def _config_path() -> ModuleType:
    from gpushare_spawner import shipped

    return shipped


def _demo() -> ModuleType:
    from gpushare_spawner import demo

    return demo


# Imported only when asked for: `gpushare status` in a notebook's terminal must not load a hub.
COMMANDS: dict[str, tuple[str, Callable[[], ModuleType]]] = {
    "agent": ("run the agent of a GPU machine", _agent),
    "service": ("run the idle culler and the board, as a JupyterHub service", _service),
    "templates": ("check compute templates, or print their JSON Schema", _templates),
    "status": ("show this notebook server's GPU share, tier and memory", _status),
    "doctor": ("check this GPU machine, and say what to do about what is wrong", _doctor),
    "config-path": ("print where the config files, templates and unit files are that come with it", _config_path),
    "demo": ("run a hub with shared GPUs on this machine, to try things out", _demo),
}


def subcommand_parser(name: str) -> argparse.ArgumentParser:
    """The parser of `gpushare NAME`, for the documentation. Raises KeyError."""
    summary, load = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"gpushare {name}", description=_sentence(summary))
    load().configure(parser)
    return parser


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="gpushare", description="Shared GPUs for JupyterHub.")
    parser.add_argument("--version", action="version", version=f"gpushare-spawner {__version__}")
    parts = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, (summary, load) in COMMANDS.items():
        part = parts.add_parser(name, help=summary, description=_sentence(summary))
        if name == wanted:
            module = load()
            module.configure(part)
            part.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        result: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read what we print (head, less) has seen enough; nothing more may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result


if __name__ == "__main__":
    sys.exit(main())
