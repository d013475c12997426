"""Stand-ins of the device plugins and schedulers of other sharing layers: what they publish, and what they refuse.

Each follows its project's public source; versions and files stand in `gpushare_spawner.model.layers_file`.
"""
