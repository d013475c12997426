"""Pods with a share on this node, and their sessions.

A changed tier takes this way: `pod_watch`, `sessions`, `annotations.TierAnnotations`,
`agent.sessions.tiers.Tiers.move`.
"""
