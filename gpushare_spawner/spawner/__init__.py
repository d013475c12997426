"""The JupyterHub side: what is offered, who gets it, where it goes, and the spawners that start it.

``local`` starts processes: its ``mixin`` makes a spawner a sharing one. A spawner on another platform takes the mixin
too and overrides what it says about the place a server runs in: the user's uid and the pid. ``kubernetes`` starts pods.
What both need is beside them: ``options``, ``queue``, ``form``, and ``base`` with the settings.
"""
