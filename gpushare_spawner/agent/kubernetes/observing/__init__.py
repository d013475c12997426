"""An agent that only observes: another sharing layer gives out the node's GPUs, and the agent offers none.

Its report has the GPU work of pods with a share of that layer. It writes to no pod: the service changes tiers and
notices, and a server can only be stopped.
"""
