"""Sentences about what users and admins ask for: keeps, changes of a share, cordons and drains."""
