"""The history: GPU time by user, group, template and GPU, idle actions, and waits of spawns.

`recorder` converts the agents' reports to amounts, `store` stores them in a database, and `queries` reads them.
"""
