"""The names and values that the parts share in a cluster: annotations, labels, resources, ConfigMaps of reports.

Pure data: names, and values to text and back. The API client is `clients.api`.
"""
