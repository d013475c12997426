"""Compute templates as files: schema, YAML with line numbers, problems, the folder that is read again, the command."""
