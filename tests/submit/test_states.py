from __future__ import annotations

import pytest

from slurm_pt.submit.states import JobPhase, job_phase, parse_state

# Every state of squeue's and sacct's manual pages (22.05 to 24.11), and what it means to who waits.
PHASES = {
    JobPhase.waiting: "PENDING CONFIGURING REQUEUED REQUEUE_FED",
    JobPhase.held: "RESV_DEL_HOLD REQUEUE_HOLD SPECIAL_EXIT SUSPENDED STOPPED",
    JobPhase.running: "RUNNING RESIZING SIGNALING STAGE_OUT COMPLETING",
    JobPhase.ended_well: "COMPLETED",
    JobPhase.ended_badly: (
        "BOOT_FAIL CANCELLED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED "
        "RECONFIG_FAIL REVOKED TIMEOUT"
    ),
    JobPhase.unknown: "POWER_UP_NODE NEWSTATE",
}


@pytest.mark.parametrize(
    ("state", "phase"),
    [(state, phase) for phase, states in PHASES.items() for state in states.split()],
)
def test_every_state_means_one_of_six_things_f79(state, phase):
    assert job_phase(state) is phase
    assert job_phase(f"{state.lower()}+") is phase


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("completing", "COMPLETING"),
        (" TIMEOUT ", "TIMEOUT"),
        ("", ""),
    ],
)
def test_a_state_in_every_spelling_f79(text, state):
    assert parse_state(text) == state


@pytest.mark.parametrize(
    "reason", ["JobHeldUser", "JobHeldAdmin", "launch failed requeued held", "job requeued in held"]
)
def test_a_pending_job_that_waits_for_a_person_is_held(reason):
    assert job_phase("PENDING", reason) is JobPhase.held


def test_no_state_is_unknown_and_never_an_end_f78():
    assert job_phase("") is JobPhase.unknown
