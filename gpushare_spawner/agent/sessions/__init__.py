"""Sessions of this machine: units, messages of their processes, and records that survive a restart.

The records on disk, the socket and the memory limit are in session_records.py, session_socket.py and session_limit.py.
"""
