"""The agent's files on disk."""
