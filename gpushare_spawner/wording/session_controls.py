"""Keeps, exemptions, messages and other acts of users and admins: what was done, and why something was not."""

from __future__ import annotations

ASK_UNKNOWN = "The GPU agent of this machine is older than your notebook server and does not know this request."
ASKED_BEFORE = "Another request has the same number. Send the request again."
ASKED_TOO_OFTEN = "There were too many requests. Try again in a minute."
