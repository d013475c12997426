"""The JupyterHub side: what is offered, who gets it, where it goes, and the spawners that start it.

``mixin`` makes a spawner a sharing one; ``local``, ``simple`` and ``systemd`` are such spawners. A spawner on another
platform takes the mixin too and overrides what it says about the place a server runs in: the user's uid and the pid.
"""
