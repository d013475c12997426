"""Directives for the reference pages. Each puts a text of reference_text.py, read from the code, into the page.

| directive | argument | shows |
|---|---|---|
| gpushare-settings | a part of SETTINGS | all settings of that part |
| gpushare-quota-fields | file or Group | the fields of quotas.yaml, or of an entry of it |
| gpushare-idle-fields | file, or the name of a part | the fields of idle.yaml, or of a part of it |
| gpushare-layers | | what each sharing layer can, as a table |
| gpushare-layer-notes | | what must be known of each sharing layer, and where that is from |
| gpushare-layer-fields | file, or the name of a part | the fields of layers.yaml, or of a part of it |
| gpushare-notifier-fields | file, or the name of a part | the fields of the file of notifiers, or of a part of it |
| gpushare-commands | | every subcommand of gpushare, with its options |
| gpushare-metrics | agent-without-token, agent-with-token or service | its metric families |
| gpushare-addresses | service, agent or notebook | what answers there |
| gpushare-rest-api | | the operations of the service's REST API |
| gpushare-frames | notebook, agent or features | the frames of the session socket, or its feature bits |
| gpushare-fields | module:Class | the fields of a class |
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import reference_text
import yaml
from docutils import nodes
from docutils.statemachine import StringList
from prometheus_client.core import Metric
from reference_text import Setting
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tornado.web import Application

from gpushare_spawner import cli
from gpushare_spawner.model.layers import LAYERS

SURROUNDINGS = ("GPUSHARE_", "JUPYTERHUB_", "NODE_NAME", "POD_NAMESPACE", "XDG_RUNTIME_DIR")
"""Beginnings of the environment variables that defaults of options are taken from."""


@contextlib.contextmanager
def anywhere() -> Iterator[None]:
    """Without the environment of whoever builds the site: a default must not name this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SURROUNDINGS)}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one subcommand. Raises KeyError."""
    with anywhere():
        return cli.subcommand_parser(name)


def template_schema(of: str = "template") -> dict[str, Any]:
    """The JSON Schema as `gpushare templates schema` prints it. ``of``: template, quotas, idle or layers."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["templates", "schema", of])
    schema: dict[str, Any] = json.loads(out.getvalue())
    return schema


def notifier_schema() -> dict[str, Any]:
    """The JSON Schema of the file of notifiers."""
    from gpushare_spawner.service.notifiers.config import NotifierConfig
    from gpushare_spawner.templates.command import file_schema

    return file_schema(NotifierConfig, "Notifiers")


def chart() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of the agents' chart, and its values."""
    folder = Path(__file__).resolve().parents[2] / "helm-values" / "gpushare-agent"
    return json.loads((folder / "values.schema.json").read_text()), yaml.safe_load((folder / "values.yaml").read_text())


def _of_schema(of: str) -> Iterator[Setting]:
    return reference_text.schema_settings(template_schema(of))


def _of_commands() -> Iterator[Setting]:
    for name in cli.COMMANDS:
        if name not in ("agent", "service"):
            yield from reference_text.command_settings(command_parser(name))


SETTINGS: dict[str, Callable[[], Iterable[Setting]]] = {
    "gpushare-local": lambda: reference_text.spawner_settings("gpushare-local"),
    "gpushare-kube": lambda: reference_text.spawner_settings("gpushare-kube"),
    "agent": lambda: reference_text.command_settings(command_parser("agent")),
    "service": lambda: reference_text.command_settings(command_parser("service")),
    "commands": _of_commands,
    "config-files": lambda: reference_text.environment_settings("config-files"),
    "library": lambda: reference_text.environment_settings("library"),
    "templates": lambda: _of_schema("template"),
    "quotas": lambda: _of_schema("quotas"),
    "idle": lambda: _of_schema("idle"),
    "layers": lambda: _of_schema("layers"),
    "placement": lambda: _of_schema("placement"),
    "notifiers": lambda: reference_text.schema_settings(notifier_schema()),
    "chart": lambda: reference_text.chart_values(*chart()),
}
"""All settings of the product, by part."""


def metric_families(part: str) -> list[Metric]:
    """The families that a part offers, of a node without sessions. Raises KeyError."""
    from gpushare_spawner.agent.metrics import ReportCollector
    from gpushare_spawner.model.report import Report
    from gpushare_spawner.service.actions.context import Counters
    from gpushare_spawner.service.sources import ServiceSnapshot
    from gpushare_spawner.service.web.metrics import service_families

    def of_agent(names: bool) -> list[Metric]:
        report = Report(node="node", published_at=0, gpus=())
        return list(ReportCollector(lambda: report, names).collect())

    def open_to_all() -> set[str]:
        return {one.name for one in of_agent(False)}

    def of_service() -> list[Metric]:
        return list(service_families(ServiceSnapshot(0.0), Counters()))

    offers: dict[str, Callable[[], list[Metric]]] = {
        "agent-without-token": lambda: of_agent(False),
        "agent-with-token": lambda: [one for one in of_agent(True) if one.name not in open_to_all()],
        "service": of_service,
    }
    return offers[part]()


def application(part: str) -> Application:
    """The web application of a part, as the part itself makes it. Raises KeyError."""
    return {"service": _service, "agent": _agent, "notebook": _notebook}[part]()


def _service() -> Application:
    from gpushare_spawner.service.actions.context import ActionContext
    from gpushare_spawner.service.dashboard import DashboardPage
    from gpushare_spawner.service.reports import RecentReports
    from gpushare_spawner.service.sources import DashboardSources
    from gpushare_spawner.service.web.dashboard import dashboard_application

    context = ActionContext((), mock.Mock(), dict)
    sources = DashboardSources(context, RecentReports([]), lambda snapshots, templates, now: [])
    prefix = "/services/gpushare/"
    return dashboard_application(sources, prefix, more=[(prefix, DashboardPage, {})])


def _agent() -> Application:
    from gpushare_spawner.agent.metrics import metrics_application

    return metrics_application(mock.Mock())


def _notebook() -> Application:
    from gpushare_spawner.notebook import extension

    server = mock.Mock()
    server.web_app = Application(base_url="/user/ada/")
    with anywhere():
        extension._load_jupyter_server_extension(server)
    return Application(server.web_app.default_router.rules[0].target.rules)


class Generated(SphinxDirective):
    """Parses the text of its subclass."""

    has_content = False
    optional_arguments = 1

    def text(self, argument: str) -> str:
        """What to show, in Markdown."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        text = self.text(self.arguments[0] if self.arguments else "")
        container = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), source=f"generated by {self.name}"), 0, container, True)
        found: list[nodes.Node] = container.children
        return found


class Settings(Generated):
    def text(self, argument: str) -> str:
        return reference_text.settings(SETTINGS[argument]())


class QuotaFields(Generated):
    def text(self, argument: str) -> str:
        return reference_text.file_fields(template_schema("quotas"), argument)


class IdleFields(Generated):
    def text(self, argument: str) -> str:
        return reference_text.file_fields(template_schema("idle"), argument)


class LayerFields(Generated):
    def text(self, argument: str) -> str:
        # the options of each layer have a table of their own
        return reference_text.file_fields(template_schema("layers"), argument, nested=False)


class LayerMatrix(Generated):
    def text(self, argument: str) -> str:
        return reference_text.layers(LAYERS.values())


class LayerNotes(Generated):
    def text(self, argument: str) -> str:
        return reference_text.layer_notes(LAYERS.values())


class NotifierFields(Generated):
    def text(self, argument: str) -> str:
        return reference_text.file_fields(notifier_schema(), argument)


class Commands(Generated):
    def text(self, argument: str) -> str:
        return "\n".join(reference_text.command(command_parser(name)) for name in cli.COMMANDS)


class Metrics(Generated):
    def text(self, argument: str) -> str:
        return reference_text.metrics(metric_families(argument))


class Addresses(Generated):
    def text(self, argument: str) -> str:
        return reference_text.addresses(application(argument))


class RestApi(Generated):
    def text(self, argument: str) -> str:
        from gpushare_spawner.service.api.api import openapi_document

        return reference_text.rest_api(openapi_document("/services/gpushare/"))


class Frames(Generated):
    def text(self, argument: str) -> str:
        return reference_text.frames(argument)


class Fields(Generated):
    def text(self, argument: str) -> str:
        return reference_text.fields(argument)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    for name, directive in (
        ("settings", Settings),
        ("quota-fields", QuotaFields),
        ("idle-fields", IdleFields),
        ("layers", LayerMatrix),
        ("layer-notes", LayerNotes),
        ("layer-fields", LayerFields),
        ("notifier-fields", NotifierFields),
        ("commands", Commands),
        ("metrics", Metrics),
        ("addresses", Addresses),
        ("rest-api", RestApi),
        ("frames", Frames),
        ("fields", Fields),
    ):
        app.add_directive(f"gpushare-{name}", directive)
    # what is read here is no file that Sphinx watches: read these pages anew each time
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: _generated_pages(env))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _generated_pages(env: Any) -> list[str]:
    return [page for page in env.found_docs if page.startswith("reference/")]
