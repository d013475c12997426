"""Compute templates as files: JSON Schemas, YAML with line numbers, problems, the watched folder, the command."""
