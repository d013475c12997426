"""The form on which a user chooses a template."""
