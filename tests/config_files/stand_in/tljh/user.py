MADE: list[str] = []


def ensure_user(username: str) -> None:
    MADE.append(username)
