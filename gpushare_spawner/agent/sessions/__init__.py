"""Sessions of this machine: units, messages of their processes, and records that survive a restart."""
