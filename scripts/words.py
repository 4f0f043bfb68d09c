"""Words that messages share."""


def counted(number: int, noun: str) -> str:
    """`1 student`, `2 students`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
