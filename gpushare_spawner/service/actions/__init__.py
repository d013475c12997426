"""Actions of users and admins on sessions, such as keep, release and stop. The API and the asks call them."""
