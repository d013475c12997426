"""Policy that decides the tier of an idle session. Pure: time is an argument.

`decide` is for sessions with a GPU share, `overdue` for servers without a share and for users. `effective_idle` returns
the idle actions of a session under its template and the admin's policy.
"""
