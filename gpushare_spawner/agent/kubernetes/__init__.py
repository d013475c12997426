"""What makes an agent one of a cluster. Without --kubernetes nothing here is imported."""
