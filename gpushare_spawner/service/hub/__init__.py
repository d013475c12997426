"""The service's use of the hub: servers and users, rights, and actions."""
