"""Which GPU a share goes to: the ledger and the strategies. Pure functions."""
