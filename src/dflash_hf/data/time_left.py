"""Durations for people."""


def duration(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
