"""Pods with a share on this node, and their sessions.

A changed tier takes this way: `pod_watch`, `sessions`, `annotations.follow_tier`,
`agent.sessions.tiers.Tiers.move`.
"""
