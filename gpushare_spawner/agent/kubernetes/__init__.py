"""The agent in a Kubernetes cluster. Imported only with --kubernetes."""
