"""Messages about upcoming idle actions to users with a closed notebook tab: by e-mail, webhook or an admin's class.

`config` is the admin's file, `outbox` selects the messages and their time, `senders` sends e-mail and webhooks.
"""
