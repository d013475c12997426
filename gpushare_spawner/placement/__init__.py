"""Placement of shares on GPUs: the ledger and the strategies. Pure, without I/O."""
