"""Actions of users and admins on sessions: keep, release, stop and so on. What acts for a person calls it."""
