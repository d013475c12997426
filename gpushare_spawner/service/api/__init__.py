"""The REST API, version 1.

Each operation is declared once. Its handler and its part of the OpenAPI document are generated from the declaration.
"""
