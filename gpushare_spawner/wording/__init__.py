"""All sentences that users read about shares, tiers, notices and limits. Pure functions of data.

The problems of template files, for admins, are in `templates.problems`.
"""
