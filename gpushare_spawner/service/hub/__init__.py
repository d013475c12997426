"""What the service asks of the hub: servers and users, rights, and actions."""
