"""The JupyterHub side: spawners that place a server on a shared GPU and start it there.

``local`` starts processes: its ``mixin`` adds GPU shares to a spawner. A spawner on another platform uses the mixin too
and overrides the methods that depend on the platform: the user's uid and the pid. ``kubernetes`` starts pods. The code
for both is in ``options``, ``queue``, ``form``, ``attempt`` and ``base`` (the settings).
"""
