"""Quotas of users and groups, and the order of waiting spawns. Pure rules over `model.quota`: time is an argument.

`QuotaAccounts` finds the account that a server is charged to, `QuotaUsage` keeps the present use of each account,
`FairShare` its recent use over quota, `ordered` sorts the waiting spawns, and `reclaimed` chooses the sessions that
make way for them.
"""
