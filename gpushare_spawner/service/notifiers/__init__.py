"""Messages about upcoming idle actions to users with a closed notebook tab, by e-mail, webhook or an admin's class.

`config` reads the admin's file, `outbox` decides which messages are sent and when, and `senders` sends e-mail and
webhooks.
"""
