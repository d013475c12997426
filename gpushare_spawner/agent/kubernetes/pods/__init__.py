"""Pods with a share on this node, and their sessions."""
