"""The pod of one server: what its settings say before there is one, and its manifest with the share."""
