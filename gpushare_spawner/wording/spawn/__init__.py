"""What a user reads before the server runs: the form's cards, the queue, refusals, failures."""
