"""The idle culler: decides on each session's tier and carries out idle actions."""
