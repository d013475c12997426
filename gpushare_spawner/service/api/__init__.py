"""The REST API, version 1: operations are declared, and handlers and the OpenAPI document are made of the
declarations."""
