"""Sessions of this machine: what they hold, what they say, and what is kept over a restart."""
