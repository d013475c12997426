"""The agent in a Kubernetes cluster. It is imported only with --kubernetes."""
