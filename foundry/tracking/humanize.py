"""Formatting of numbers for people."""

import math


def count(value: float) -> str:
    """Format a number with a suffix: 1234567 as 1.23M."""
    if not math.isfinite(value):
        return str(value)
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{suffix}" if abs(value) < factor * 999.5 else f"{value / factor:.0f}{suffix}"
    return f"{value:.3g}" if value != int(value) else str(int(value))


def duration(seconds: float) -> str:
    """Format seconds as a duration: 3661 as 1:01:01."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}:{minutes:02d}:{rest:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"


def number(value: object) -> str:
    """Format a float with four decimals, None as `-`, and anything else with `str`."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
