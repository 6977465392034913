"""Memory and time as Slurm spells them. Measured against sbatch of 22.05; see the tests' tables."""

from __future__ import annotations

import math
import re

_MEMORY = re.compile(r"(?P<number>[0-9]{1,11})(?:(?P<unit>[KMGT])B?)?", re.IGNORECASE)
_KIB_PER_UNIT = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}
_LONGEST_S = 2**31 - 120
"""Slurm counts a limit's seconds in 32 bits; beyond that sbatch takes it for another number."""


def parse_memory_mib(text: str) -> int:
    """Memory in MiB (Slurm's M is 2**20 bytes); 0 means all of the node.

    Raises ValueError with the rule for spellings that Slurm refuses.

    >>> parse_memory_mib("64G"), parse_memory_mib("1500"), parse_memory_mib("1tb")
    (65536, 1500, 1048576)
    """
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(
            "Slurm takes a whole number and one of K, M, G, T "
            "(a bare number is MB, 0 all of the node)"
        )
    kib = int(match["number"]) * _KIB_PER_UNIT[(match["unit"] or "M").upper()]
    return -(-kib // 1024)


def suggest_memory(text: str) -> str:
    """A spelling that Slurm takes for what was probably meant, or an example.

    >>> suggest_memory("1.5G"), suggest_memory("64GiB"), suggest_memory("64 GB")
    ('1536M', '64G', '64G')
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTkmgt]?)i?[Bb]?\s*", text)
    if match is None:
        return "64G"
    number, unit = float(match[1]), match[2].upper()
    smaller = {"T": "G", "G": "M", "M": "K", "": "K"}.get(unit)
    if number != int(number) and smaller:
        number, unit = number * 1024, smaller
    suggestion = f"{math.ceil(number)}{unit}"
    return suggestion if _MEMORY.fullmatch(suggestion) else "64G"


def parse_time_limit_s(text: str) -> int | None:
    """A time limit in seconds, as Slurm understands it; None for no limit.

    Slurm counts limits in whole minutes and rounds seconds up.
    Raises ValueError with the rule for spellings that Slurm refuses.

    >>> parse_time_limit_s("90"), parse_time_limit_s("4:00"), parse_time_limit_s("1-2:30")
    (5400, 240, 95400)
    >>> parse_time_limit_s("UNLIMITED") is None
    True
    """
    if text.upper() in {"0", "-1", "INFINITE", "UNLIMITED"}:
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    digits = [*parts, days] if dash else parts
    if len(parts) > 3 or not all(re.fullmatch(r"[0-9]+", part) for part in digits):
        raise ValueError(
            "Slurm takes minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes or days-hours:minutes:seconds"
        )
    numbers = [int(part) for part in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 1:
        hours, minutes, seconds = 0, numbers[0], 0
    elif len(numbers) == 2:  # not hours:minutes, as many believe
        hours, (minutes, seconds) = 0, numbers
    else:
        hours, minutes, seconds = numbers
    total_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s > _LONGEST_S:
        raise ValueError(f"longer than Slurm can count, {_LONGEST_S // 86400} days")
    return -(-total_s // 60) * 60 or None  # 00:00 is no limit, as 0 is


def render_duration(seconds: int | None) -> str:
    """A duration in words.

    >>> render_duration(5400), render_duration(95400), render_duration(None)
    ('1 h 30 min', '1 d 2 h 30 min', 'no limit')
    """
    if seconds is None:
        return "no limit"
    minutes, rest_s = divmod(seconds, 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"
