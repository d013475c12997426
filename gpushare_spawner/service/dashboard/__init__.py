"""The dashboard: a page made of what the operations of the REST API answer. Its HTML and scripts are in `web`."""
