"""The prefix of all names that the project gives in a cluster: annotations, labels and resources."""

PREFIX = "gpushare-spawner.io/"
