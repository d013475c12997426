"""Messages to users whose notebook tab is closed: of coming idle actions, by e-mail, webhook or a class of the admin's.

`config` is the admin's file, `outbox` decides who gets a message and when, `mail` and `webhook` send it.
"""
