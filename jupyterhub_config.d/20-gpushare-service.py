# The idle culler and the dashboard, as a service of the hub, with the fewest scopes that work.
# See docs/explanation/culler.md.
#
# Environment of the hub: GPUSHARE_TEMPLATES and GPUSHARE_CONTROL, as for the spawner; GPUSHARE_SERVICE_URL, the address
# of the dashboard for the hub's proxy (http://127.0.0.1:10190); GPUSHARE_HISTORY, the SQLAlchemy URL of the
# history's database (a file beside the hub's SQLite database), or false for no history; GPUSHARE_NOTIFIERS, a
# file of e-mail and webhooks for users whose tab is closed, and GPUSHARE_SECRET_*, its secrets;
# GPUSHARE_SERVICE_OPTIONS, more options of `gpushare service`, like --cull-every=30s.
#
# In a cluster (KUBERNETES_SERVICE_HOST is set, GPUSHARE_CONTROL is not) the service uses the API server, with the hub's
# service account. The users' pods are in GPUSHARE_NAMESPACE, or else in the hub's POD_NAMESPACE. The proxy reaches the
# dashboard through the hub's Service, port 10190. Values for zero-to-jupyterhub: docs/guides/kubernetes.md
import os
import shlex
import sys
from urllib.parse import urlparse

from jupyterhub.app import JupyterHub

from gpushare_spawner.service.hub.roles import (
    CUSTOM,
    FOR_FORM,
    OF_USERS,
    culler_options,
    drop_login_warnings,
    grant_to_admins,
    grant_to_everybody,
    replace_culler,
    start_scope,
)


def _gpushare_defined(trait):
    """Return the items that earlier files have put into a list: the hub does not start if a role is defined twice."""
    if isinstance(trait, list):
        return trait
    # not a list yet: items that the hub joins with the default when it starts
    return [item for part in trait.to_dict().values() if isinstance(part, list) for item in part]


# a service inherits no variables of the hub, so it gets them as options
_gpushare_command = [sys.executable, "-m", "gpushare_spawner.cli", "service", f"--end-with-hub={os.getpid()}"]
for _option, _variable in (
    ("--templates-dir", "GPUSHARE_TEMPLATES"),
    ("--control-socket", "GPUSHARE_CONTROL"),
    ("--notifiers", "GPUSHARE_NOTIFIERS"),
):
    if os.environ.get(_variable):
        _gpushare_command.append(f"{_option}={os.environ[_variable]}")
# what the file of notifiers can name as a secret
_gpushare_environment = {name: value for name, value in os.environ.items() if name.startswith("GPUSHARE_SECRET_")}
_gpushare_db = c.JupyterHub.db_url if "db_url" in c.JupyterHub else ""
if _gpushare_db.startswith("sqlite:////") and not os.environ.get("GPUSHARE_HISTORY"):
    # beside the hub's own database, which is kept
    _gpushare_environment["GPUSHARE_HISTORY"] = f"{_gpushare_db.rpartition('/')[0]}/gpushare-history.sqlite"
elif os.environ.get("GPUSHARE_HISTORY"):
    # not an option: the URL can have a password, and all users of a machine can read command lines
    _gpushare_environment["GPUSHARE_HISTORY"] = os.environ["GPUSHARE_HISTORY"]
_gpushare_url = os.environ.get("GPUSHARE_SERVICE_URL") or "http://127.0.0.1:10190"
if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("GPUSHARE_CONTROL"):
    _gpushare_namespace = os.environ.get("GPUSHARE_NAMESPACE") or os.environ.get("POD_NAMESPACE") or "default"
    _gpushare_command.append(f"--namespace={_gpushare_namespace}")
    if c.KubeSpawner.get("enable_user_namespaces") or c.GPUShareSpawner.get("enable_user_namespaces"):
        _gpushare_command.append("--all-namespaces")
    if c.GPUShareSpawner.get("nodes_are_added"):
        _gpushare_command.append("--nodes-are-added")
    for _variable in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        if os.environ.get(_variable):
            _gpushare_environment[_variable] = os.environ[_variable]
    if "hub_connect_url" in c.JupyterHub and not os.environ.get("GPUSHARE_SERVICE_URL"):
        # The proxy is another pod, and uses the hub's Service. No process can listen on a Service's address.
        _gpushare_url = f"http://{urlparse(c.JupyterHub.hub_connect_url).hostname}:10190"
        _gpushare_command.append("--ip=*")
    if "hub_bind_url" in c.JupyterHub and urlparse(c.JupyterHub.hub_bind_url).scheme == "http":
        # directly to the hub in the same pod: the network policy of the hub's Service admits proxy and users only
        _gpushare_port = urlparse(c.JupyterHub.hub_bind_url).port or 8081
        _gpushare_base = c.JupyterHub.base_url if "base_url" in c.JupyterHub else "/"
        _gpushare_command.append(f"--url=http://localhost:{_gpushare_port}{_gpushare_base.rstrip('/')}/hub/api")
_gpushare_command += culler_options()
_gpushare_command += shlex.split(os.environ.get("GPUSHARE_SERVICE_OPTIONS", ""))

if not any(service.get("name") == "gpushare" for service in _gpushare_defined(c.JupyterHub.services)):
    c.JupyterHub.services.append(
        {
            "name": "gpushare",
            "command": _gpushare_command,
            "environment": _gpushare_environment,
            "url": _gpushare_url,
            "display": True,
            "info": {"title": "Shared GPUs"},
            # users see their own sessions without a confirmation page
            "oauth_no_confirm": True,
            # so that the dashboard knows who may see all sessions, act on them, and drain GPUs
            "oauth_client_allowed_scopes": list(CUSTOM),
        }
    )

replace_culler(c.JupyterHub)
drop_login_warnings()

c.JupyterHub.custom_scopes.update({scope: {"description": text} for scope, text in CUSTOM.items()})

if not any(role.get("name") == "gpushare-service" for role in _gpushare_defined(c.JupyterHub.load_roles)):
    c.JupyterHub.load_roles.append(
        {
            "name": "gpushare-service",
            "description": "The idle culler and the dashboard for shared GPUs: lists servers and groups, stops idle "
            "servers, restarts servers for their users",
            "scopes": [
                "list:users",
                "read:servers",
                "delete:servers",
                "read:users:groups",
                start_scope(),
                # for the hub's own requests, see FOR_FORM
                *FOR_FORM,
            ],
            "services": ["gpushare"],
        }
    )

# All users may open the dashboard, and give tokens the right to act on their own sessions, whatever other files say
# about the role `user`.
grant_to_everybody(c.JupyterHub, OF_USERS, hasattr(JupyterHub, "extra_user_scopes"))
# Admins need none of the scopes on the dashboard, and can give each of them to a token.
grant_to_admins(list(CUSTOM))
