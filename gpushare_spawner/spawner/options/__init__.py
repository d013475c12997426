"""What a user may choose, and what a choice means for a spawner: profiles, validation, settings for one spawn."""
