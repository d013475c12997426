"""Inside the notebook server: tells the agent about kernels, and the user about the share."""
