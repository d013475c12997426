"""Drops a warning of the hub about each login to the dashboard by a user who may not see all sessions.

The dashboard asks for the custom scopes, so that the hub grants them to those who have them. The hub warns of each user
who lacks one, which is the normal case here. (jupyterhub/apihandlers/auth.py, OAuthAuthorizeHandler)
"""

from __future__ import annotations

import logging

from gpushare_spawner.service.hub.scopes import SEE_ALL


def drop_login_warnings() -> None:
    """Drop the warning from the log of a hub that runs in this process. A second call has no effect."""
    log = logging.getLogger("JupyterHub")
    if not any(isinstance(one, _ExpectedLogins) for one in log.filters):
        log.addFilter(_ExpectedLogins())


class _ExpectedLogins(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not (" requested scopes " in message and SEE_ALL in message and " granting only " in message)
