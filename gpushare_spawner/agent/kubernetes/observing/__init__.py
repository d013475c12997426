"""An agent that only observes, on a node whose GPUs another sharing layer gives out: it offers no GPU.

Its report says what the GPU work of pods with a share of that layer is. It writes to no pod: tiers and notices are the
service's, and a server can only be stopped.
"""
