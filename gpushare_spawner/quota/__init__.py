"""Quotas of users and groups, and the order of waiting spawns. Pure rules on `model.quota`; time is an argument.

`QuotaAccounts` finds the account that a server is charged to; a user in several groups chooses one.
`QuotaUsage` tracks the current use of each account, and `FairShare` its recent use over quota. `ordered` sorts the
waiting spawns. `reclaimed` chooses the sessions that make way for them.
"""
