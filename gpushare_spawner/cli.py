"""``gpushare``: one command with a subcommand for each part.

Each part's module has ``configure(parser)`` and ``run(options) -> int``. The agent and the service do not import the
Kubernetes code. This module passes it to them as arguments.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from gpushare_spawner import __version__
from gpushare_spawner.wording.amounts import belongs_to_extra, missing_package


class Part(NamedTuple):
    """A subcommand."""

    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _agent() -> Part:
    from gpushare_spawner.agent import command
    from gpushare_spawner.agent.kubernetes import options as cluster

    return Part(
        partial(command.configure, configure_cluster=cluster.configure), partial(command.run, read_cluster=cluster.read)
    )


def _service() -> Part:
    from gpushare_spawner.service.hub_process import end_with_hub

    # before the imports, which take seconds
    end_with_hub(sys.argv[1:])
    from gpushare_spawner.service import command
    from gpushare_spawner.service.kubernetes.agents import agents_of_cluster

    return Part(command.configure, partial(command.run, cluster_agents=agents_of_cluster))


def _of(module: str, configure: str = "configure", run: str = "run") -> Callable[[], Part]:
    def load() -> Part:
        part = import_module(f"gpushare_spawner.{module}")
        return Part(getattr(part, configure), getattr(part, run))

    return load


# Each part is imported only for its own subcommand: `gpushare status` in a notebook's terminal must not load a hub.
COMMANDS: dict[str, tuple[str, Callable[[], Part]]] = {
    "agent": ("run the agent of a GPU machine", _agent),
    "service": ("run the idle culler and the dashboard, as a JupyterHub service", _service),
    "templates": ("check compute templates and quotas, or print their JSON Schemas", _of("templates.command")),
    "status": ("show this notebook server's GPU share, tier and memory", _of("notebook.commands")),
    "keep": (
        "keep this notebook server's GPU share while it is idle",
        _of("notebook.commands", "configure_keep", "keep"),
    ),
    "release": (
        "release this notebook server's GPU share now; kernels and data stay",
        _of("notebook.commands", "configure_release", "release"),
    ),
    "smi": ("show this notebook server's GPU share as nvidia-smi shows a GPU", _of("notebook.smi")),
    "doctor": ("check this GPU machine, and explain how to solve problems", _of("doctor.command")),
    "plan": ("say how many GPUs a hub needs, from its logs, database or CSV files", _of("plan")),
    "config-path": ("print the paths of the shipped config files, templates and unit files", _of("shipped")),
    "demo": ("run a hub with shared GPUs on this machine, to try it out", _of("demo.command")),
}


class _Parser(argparse.ArgumentParser):
    """A parser with subcommands that report a misspelled option themselves, with their own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; an unknown argument is an error."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def subcommand_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of `gpushare NAME`, for the documentation. Raises KeyError."""
    summary, load = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"gpushare {name}", description=_sentence(summary))
    load().configure(parser)
    return parser


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser: argparse.ArgumentParser = _Parser(prog="gpushare", description="Shared GPUs for JupyterHub.")
    parser.add_argument("--version", action="version", version=f"gpushare-spawner {__version__}")
    parts = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # display names and messages can contain characters that the terminal's encoding lacks; stderr does this by
        # default
        sys.stdout.reconfigure(errors="backslashreplace")
    requested = next((word for word in arguments if not word.startswith("-")), None)
    if requested == "keep" and "--" not in arguments:
        # "-1h" is an invalid time, not an option
        wrong = next((number for number, word in enumerate(arguments) if re.match(r"-\d", word)), None)
        arguments = arguments if wrong is None else [*arguments[:wrong], "--", *arguments[wrong:]]
    parsers = {
        name: parts.add_parser(name, help=summary, description=_sentence(summary))
        for name, (summary, _) in COMMANDS.items()
    }
    try:
        if requested in parsers:
            subcommand = COMMANDS[requested][1]()
            subcommand.configure(parsers[requested])
            parsers[requested].set_defaults(run=subcommand.run)
        options = parser.parse_args(arguments)
        result: int = options.run(options)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if not belongs_to_extra(error):
            raise
        print(f"gpushare: {missing_package(f'gpushare {requested}', error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader of the output (head, less) has exited; prevent Python from writing at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result


if __name__ == "__main__":
    sys.exit(main())
