"""The queue of spawns that wait for free GPU capacity: positions, placement, reservations, availability."""
