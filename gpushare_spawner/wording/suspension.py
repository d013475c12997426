"""What users and admins read about sessions of the memory engine `suspend`."""

from __future__ import annotations

SUSPENDED = (
    "This session is suspended: other sessions need the GPU's memory, and its own is in host memory. Its next GPU work "
    "resumes it."
)


def stays(reason: str) -> str:
    """Return what it means that a session cannot be suspended; nothing without a reason."""
    return f"This session cannot be suspended and keeps its GPU memory: {reason}" if reason else ""
