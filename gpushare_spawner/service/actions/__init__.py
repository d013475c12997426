"""Actions of users and admins on sessions: keep, release, stop and so on. The API and the asks call them."""
