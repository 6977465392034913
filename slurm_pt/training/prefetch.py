"""The next steps' data, made in a thread while the loop computes.

No state that outlives the loop: what is made for a step is a function of the step, so what was
made ahead and not used is simply made again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

T = TypeVar("T")

SLICE_S = 0.2
"""How long the loop waits for data before it looks whether it is to stop."""
CLOSE_S = 2.0
"""How long the end of the loop waits for the thread: one that hangs in a read is left behind."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Made(Generic[T]):
    """What the thread made for a step, or why it could not."""

    step: int
    value: T | None
    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """`make(step)` for each of `steps` in turn, up to `ahead` of them before they are taken.

    A context: the thread starts on entry and ends with it, whatever happens inside. With
    `ahead` 0 there is no thread, and `take` makes what it gives.
    """

    def __init__(self, make: Callable[[int], T], steps: range, *, ahead: int):
        self._make, self._steps, self._ahead = make, steps, ahead
        self._ready: deque[_Made[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="slurm_pt-data", daemon=True)

    def __enter__(self) -> Self:
        if self._ahead > 0 and len(self._steps) > 0:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("event=data_thread_left waited_s=%g", CLOSE_S)

    def take(self, step: int, *, give_up: Callable[[], bool]) -> T | None:
        """What was made for a step: the next one of `steps`. Raises what `make` raised for it.

        None when `give_up()` while there is nothing; it is asked only then. With `ahead` 0 it
        is not asked: the caller's own thread is in `make`.
        """
        if step not in self._steps:  # would be waited for for ever
            raise ValueError(f"step {step} is none of {self._steps}")
        if self._ahead == 0:
            return self._make(step)
        with self._changed:
            while not self._ready:
                if not self._changed.wait(SLICE_S) and not self._ready and give_up():
                    return None
            made = self._ready.popleft()
            self._changed.notify_all()
        if made.step != step:
            raise ValueError(f"steps are taken in order: asked for {step}, next is {made.step}")
        if made.error is not None:
            raise made.error
        return made.value

    def _work(self) -> None:
        for step in self._steps:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                if self._closed:
                    return
            made = self._made(step)
            with self._changed:
                if self._closed:
                    return
                self._ready.append(made)
                self._changed.notify_all()
            if made.error is not None:
                return

    def _made(self, step: int) -> _Made[T]:
        try:
            return _Made(step, self._make(step))
        except BaseException as error:  # whatever it is, it belongs to the loop
            return _Made(step, None, error)
