import logging
import threading

import pytest

from slurm_pt.training import prefetch
from slurm_pt.training.prefetch import Prefetcher


def never():
    return False


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "slurm_pt-data"]


@pytest.fixture(autouse=True)
def no_thread_is_left_f39():
    yield
    assert threads() == []


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
def test_every_step_is_made_once_and_given_in_order(ahead):
    made = []

    def make(step):
        made.append(step)
        return step * 10

    with Prefetcher(make, range(3, 9), ahead=ahead) as data:
        assert [data.take(step, give_up=never) for step in range(3, 9)] == list(range(30, 90, 10))
    assert made == list(range(3, 9))


def test_no_more_than_the_asked_number_of_steps_is_made_ahead():
    made = []
    third = threading.Event()

    def make(step):
        made.append(step)
        if len(made) == 3:
            third.set()
        return step

    with Prefetcher(make, range(100), ahead=2) as data:
        data.take(0, give_up=never)
        assert third.wait(60)
        # Steps 1 and 2 are ready; nothing is made until one of them is taken.
        (thread,) = threads()
        thread.join(0.2)
        assert made == [0, 1, 2]


def test_an_error_is_raised_at_the_step_it_belongs_to():
    def make(step):
        if step == 2:
            raise OSError(5, "Input/output error", "/data/tokens.bin")
        return step

    with Prefetcher(make, range(10), ahead=4) as data:
        assert [data.take(step, give_up=never) for step in (0, 1)] == [0, 1]
        with pytest.raises(OSError, match=r"Input/output error: '/data/tokens.bin'"):
            data.take(2, give_up=never)


def test_an_exception_in_the_loop_ends_the_thread():
    def loop():
        with Prefetcher(str, range(10), ahead=2) as data:
            data.take(0, give_up=never)
            raise KeyError("in the loop")

    with pytest.raises(KeyError):
        loop()
    assert threads() == []


def test_a_stop_is_noticed_while_a_read_hangs_f23():
    released = threading.Event()

    def make(step):
        if step == 1:
            released.wait(60)
        return step

    with Prefetcher(make, range(10), ahead=2) as data:
        # What is ready is given, whatever was asked.
        assert data.take(0, give_up=lambda: True) == 0
        assert data.take(1, give_up=lambda: True) is None
        released.set()


def test_a_thread_that_hangs_for_good_does_not_hold_up_the_end(monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.05)
    released = threading.Event()
    with (
        caplog.at_level(logging.WARNING),
        Prefetcher(lambda step: released.wait(60), range(10), ahead=2) as data,
    ):
        assert data.take(0, give_up=lambda: True) is None
        left = threads()
    assert "event=data_thread_left" in caplog.text
    assert all(thread.daemon for thread in left)  # the process can end without it
    released.set()
    left[0].join(60)


def test_nothing_to_do_is_no_thread():
    with Prefetcher(str, range(5, 5), ahead=2):
        assert threads() == []
    with Prefetcher(str, range(5), ahead=0):
        assert threads() == []


def test_steps_out_of_order_are_a_fault_of_the_caller():
    with (
        Prefetcher(str, range(5), ahead=1) as data,
        pytest.raises(ValueError, match="asked for 3, next is 0"),
    ):
        data.take(3, give_up=never)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_was_never_asked_for_is_a_fault_and_not_a_wait_for_ever(ahead):
    with (
        Prefetcher(str, range(5), ahead=ahead) as data,
        pytest.raises(ValueError, match=r"step 5 is none of range\(0, 5\)"),
    ):
        data.take(5, give_up=never)
