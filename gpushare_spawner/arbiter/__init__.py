"""Who may run on a GPU now. A pure state machine: time comes in as an argument, decisions go out."""
