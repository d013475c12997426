"""The history: GPU time by user, group, template and GPU, idle actions, and waits of spawns.

`recorder` turns the agents' reports into amounts, `store` keeps them in a database, `queries` reads them.
"""
