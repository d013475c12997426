"""Stand-ins for a cluster: an API server, a scheduler and kubelets, small enough to live in a test.

The API server speaks the Kubernetes API as its public reference describes it, for the kinds and verbs that a hub, its
spawners and our agents use. Scheduler and kubelets are ordinary clients of whatever API server they are given, so they
also run against a real one.
"""
