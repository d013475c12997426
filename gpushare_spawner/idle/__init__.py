"""The policy that decides an idle session's tier. Pure: time is an argument.

`decide` is for sessions with a GPU share, and `overdue` for servers without a share and for users. `effective_idle`
returns the idle actions that the template and the admin's policy define for a session.
"""
