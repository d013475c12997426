"""Every sentence that a user reads about shares, tiers, notices and limits, in one place. Pure functions of data.

Problems of template files, for admins, are worded in `templates.problems`.
"""
