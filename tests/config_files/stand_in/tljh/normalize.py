def generate_system_username(username: str) -> str:
    return username[:31]
