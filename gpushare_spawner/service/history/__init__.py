"""What happened to the GPUs: GPU time by user, group, template and GPU, idle actions, and waits for a server.

`metering` turns the agents' reports into amounts, `store` keeps them in a database, `recorder` joins both.
"""
