"""One per GPU machine: finds GPUs, holds sessions, arbitrates, reports."""
