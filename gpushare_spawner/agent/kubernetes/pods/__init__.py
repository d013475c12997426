"""Pods with a share on this node, and their sessions.

A tier change passes through `pod_watch`, `sessions`, `annotations.follow_tier` and
`agent.sessions.tiers.Tiers.change_tier`.
"""
