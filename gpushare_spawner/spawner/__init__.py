"""The JupyterHub side: spawners that place a server on a shared GPU and start it there.

``local`` starts processes: its ``mixin`` adds GPU shares to a spawner. A spawner on another platform uses the mixin too
and overrides the platform-specific methods, which return the user's uid and the pid. ``kubernetes`` starts pods. The
shared code is in ``options``, ``queue``, ``form``, ``attempt`` and ``base`` (the settings).
"""
