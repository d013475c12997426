"""Which tier an idle session should be in. Pure policy: time comes in as an argument.

`decide` is for sessions with a GPU share, `overdue` for servers without one and for users.
"""

from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.overdue import overdue
from gpushare_spawner.idle.policy import Decision, Step, decide

__all__ = ["Decision", "Observation", "Step", "decide", "overdue"]
