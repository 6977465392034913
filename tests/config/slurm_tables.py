"""Memory and time in all spellings, with what sbatch of 22.05.8 made of them."""

from __future__ import annotations

MEMORY = {
    "0": 0,
    "0G": 0,
    "64": 64,
    "1500": 1500,
    "1500M": 1500,
    "2500MB": 2500,
    "00010": 10,
    "1G": 1024,
    "64g": 65536,
    "64gB": 65536,
    "1GB": 1024,
    "1T": 1048576,
    "2000TB": 2097152000,
    "1K": 1,
    "1024KB": 1,
    "1500K": 2,
}
"""Text to MiB; Slurm rounds kilobytes up."""

MEMORY_REFUSED = [
    "",
    "1Gi",
    "1GiB",
    "1.5G",
    "1.",
    "120.0g",
    "1 G",
    "1G ",
    "64Q",
    "1P",
    "1B",
    "1MM",
    "-1",
    "0x10",
    "1e3",
    "G",
    "null",
    "\uff11G",  # a full-width digit
    "9" * 20,
]

MEMORY_ONLY_SLURM_TAKES = [" 1G", "+1G"]
"""Refused by us although sbatch takes them: more likely slips than wishes."""

TIME_S = {
    "90": 5400,
    "00090": 5400,
    "4:00": 240,
    "90:30": 5460,
    "0:30": 60,
    "00:00:30": 60,
    "1:30:00": 5400,
    "1:99:99": 9660,
    "1-0": 86400,
    "0-1": 3600,
    "1-99": 442800,
    "1-2:30": 95400,
    "1-2:30:30": 95460,
    "1-00:00:00": 86400,
    "365-0": 31536000,
    "0": None,
    "00": None,
    "00:00": None,
    "0-0": None,
    "-1": None,
    "INFINITE": None,
    "infinite": None,
    "UNLIMITED": None,
    "Unlimited": None,
}
"""Text to seconds; None is no limit. Slurm counts whole minutes, rounded up.

Of a limit above 365 days squeue prints INVALID, although it holds.
"""

TIME_REFUSED = [
    "",
    " 90",
    "90 ",
    "1d",
    "24h",
    "1:2:3:4",
    "1-2-3",
    "1-2:3:4:5",
    "abc",
    "5.5",
    "+5",
    ":30",
    "1:",
    "1::30",
    "Partition_Limit",
    "INVALID",
    "NOT_SET",
    "0x10",
    "\uff11",
]

TIME_ONLY_SLURM_TAKES = ["1-", "-5", "-0", "35791394", "99999999"]
"""Refused by us: sbatch takes them for something else (-5: 8000 years; 99999999: 19734 days)."""
