"""The names and values that the parts share in a cluster: annotations, labels, resources, and ConfigMaps with reports.

Pure data: names, and the conversion of values to text and back. The API client is `clients.api`.
"""
