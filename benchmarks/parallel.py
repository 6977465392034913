"""Our split training against that of others, and against our own in one process.

    python -m benchmarks.parallel

All train the same model from the same weights on the same batches; who does not arrive at the
same losses is not timed. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.comparison import (
    Times,
    disagreement,
    render_overheads,
    render_ratios,
    render_shares,
    render_table,
)
from benchmarks.contestants import ALONE, CONTESTANTS, FLOOR, OURS, contestant
from benchmarks.peer_environment import MissingPeerError, interpreter_with
from benchmarks.ranks import run_trial
from benchmarks.trial import MODELS, Layout, Trial
from tests.ranks import RankFailedError

ONE = "one"
"""Our runtime (where it cannot train the model: plain torch) in one process, with the layout's
micro-batches."""

CHECKED_STEPS = 3
CHECKS = (
    {"eps": 1e-3, "grad_clip": 1e9},
    {"eps": 1e-3, "grad_clip": 0.5},
)
"""AdamW hides a wrong scale of the gradients, and so does clipping, unless eps is large and nothing
is clipped. A wrong norm shows only where something is. So each is looked at by itself: gradients
twice as large, or a norm of 0.74 of the right one, then move the losses of the models here by
2e-4 to 6e-3 (relative, measured); with the usual eps by nothing."""

TOLERANCE = 2e-5
"""Relative. Sums of float32 in another order differ by about 1e-6 after three steps."""


@dataclass
class Comparison:
    """What was asked for, and what is known so far."""

    model: str
    layouts: list[Layout]
    wanted: list[str]
    warmup: int
    steps: int
    batch: int
    pipeline_micro_batches: int
    cache: Path
    pythons: dict[str, str] = field(default_factory=dict)
    checks: dict[str, dict[str, str]] = field(default_factory=dict)
    """What became of each contestant's check, by layout and contestant."""
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Seconds per step of every round, by layout and contestant."""

    def trial(
        self, name: str, layout: Layout, *, steps: int, warmup: int, **changes: float
    ) -> Trial:
        """One training; micro-batches are as large in one process as in the layout."""
        micro_batch = self.batch // layout.dp
        if layout.pp > 1:
            micro_batch = max(1, micro_batch // self.pipeline_micro_batches)
        baseline = OURS if self.ours_can_train else ALONE
        trial = Trial(
            contestant=baseline if name == ONE else name,
            layout=Layout() if name == ONE else layout,
            model=MODELS[self.model],
            global_batch_size=self.batch,
            micro_batch_size=micro_batch,
            warmup=warmup,
            steps=steps,
        )
        return replace(trial, **changes)  # type: ignore[arg-type]

    @property
    def ours_can_train(self) -> bool:
        return contestant(OURS).runs(Layout(), MODELS[self.model])

    def run(self, trial: Trial) -> Any:
        """The outcome; raises MissingPeerError or RankFailedError."""
        packages = contestant(trial.contestant).packages
        key = " ".join(packages)
        if key not in self.pythons:
            say(f"environment for {key or 'ourselves'}")
            self.pythons[key] = interpreter_with(packages, self.cache)
        return run_trial(trial, python=self.pythons[key])

    def check_all(self) -> None:
        """Train three steps with each; only those that agree with plain torch are timed."""
        right = self._checked_losses(ALONE, Layout())
        say(f"losses of plain torch: {' '.join(f'{loss:.6f}' for loss in right)}")
        for layout in self.layouts:
            verdicts = self.checks.setdefault(str(layout), {})
            self.times[str(layout)] = {ONE: [], FLOOR: []} if layout.world_size > 1 else {}
            for name in self.wanted:
                if name == FLOOR or not contestant(name).runs(layout, MODELS[self.model]):
                    continue
                verdicts[name] = self._check(name, layout, right)
                if verdicts[name].startswith("agrees"):
                    self.times[str(layout)][name] = []
                say(f"{layout} {name}: {verdicts[name]}")

    def _check(self, name: str, layout: Layout, right: list[float]) -> str:
        try:
            losses = self._checked_losses(name, layout)
        except MissingPeerError as error:
            return f"missing: {error}"
        except RankFailedError as error:
            return f"failed: {error}"
        difference = disagreement(losses, right)
        verdict = "agrees" if difference <= TOLERANCE else "DISAGREES, not ranked"
        return f"{verdict}: losses differ by {difference:.1e} of plain torch's"

    def _checked_losses(self, name: str, layout: Layout) -> list[float]:
        """The losses of all checks, one after the other."""
        losses = []
        for changes in CHECKS:
            trial = self.trial(name, layout, steps=CHECKED_STEPS, warmup=0, **changes)
            losses += self.run(trial).losses
        return losses

    def time_round(self) -> None:
        """One run of each, one after the other. Who fails is out of that layout."""
        for layout in self.layouts:
            of_layout = self.times[str(layout)]
            for name in list(of_layout):
                trial = self.trial(name, layout, steps=self.steps, warmup=self.warmup)
                try:
                    seconds = self.run(trial).step_s
                except RankFailedError as error:
                    del of_layout[name]
                    self.checks[str(layout)][name] = f"failed when timed: {error}"
                    say(f"{layout} {name}: {error}")
                    continue
                of_layout[name].append(seconds)
                say(f"{layout} {name}: {1000 * seconds:.1f} ms a step")

    def report(self) -> str:
        """The tables."""
        times: dict[str, Times] = {
            layout: {name: seconds for name, seconds in of_layout.items() if seconds}
            for layout, of_layout in self.times.items()
        }
        ideals, bubbles = {}, {}
        for layout in self.layouts:
            trial = self.trial(OURS, layout, steps=1, warmup=0)
            ideals[str(layout)] = layout.ideal_share(trial.num_microbatches)
            bubbles[str(layout)] = ideals[str(layout)] * layout.world_size
        ranked = [name for name in self.wanted if any(name in times[key] for key in times)]
        peers = [name for name in ranked if name != OURS]
        return "\n\n".join(
            [
                self._render_checks(),
                "Our step time over each peer's: median [smallest-largest] of the rounds' ratios.\n"
                + render_ratios(times, ours=OURS, peers=peers),
                "Step times as a share of one process's, with the layout's micro-batches.\n"
                + render_shares(
                    times, one_process=ONE, contestants=[*ranked, FLOOR], ideals=ideals
                ),
                "The floor is ranks that never talk, each with its share of the batch.\n"
                + render_overheads(times, ours=OURS, floor=FLOOR, bubbles=bubbles),
            ]
        )

    def _render_checks(self) -> str:
        rows = [
            [layout, name, verdict.strip().splitlines()[-1]]
            for layout, verdicts in self.checks.items()
            for name, verdict in verdicts.items()
        ]
        return f"The losses of {CHECKED_STEPS} steps, without and with clipping.\n" + render_table(
            ["", "", ""], rows
        )

    def as_json(self) -> dict[str, Any]:
        """Everything measured, for a file."""
        return {
            "model": self.model,
            "global_batch_size": self.batch,
            "steps": self.steps,
            "warmup": self.warmup,
            "pipeline_micro_batches": self.pipeline_micro_batches,
            "python": platform.python_version(),
            "torch": version("torch"),
            "cpus": os.cpu_count(),
            "checks": self.checks,
            "step_s": self.times,
        }


def say(line: str) -> None:
    """Progress goes to stderr, the result alone to stdout."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Check, measure, print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: the ranks are ended too
    options = _options()
    comparison = Comparison(
        model=options.model,
        layouts=[Layout.parse(name) for name in options.layouts.split(",")],
        wanted=[contestant(name).name for name in options.contestants.split(",")],
        warmup=options.warmup,
        steps=options.steps,
        batch=options.batch,
        pipeline_micro_batches=options.pipeline_micro_batches,
        cache=options.cache,
    )
    comparison.check_all()
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        comparison.time_round()
        if options.json is not None:  # after each round: a run that is stopped loses one
            options.json.write_text(json.dumps(comparison.as_json(), indent=1) + "\n")
    print(comparison.report())


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    everyone = [entry.name for entry in CONTESTANTS if entry.name != FLOOR]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--layouts", default="one,tp2,pp2,tp2pp2,dp2")
    parser.add_argument("--contestants", default=",".join(everyone))
    parser.add_argument("--rounds", type=int, default=5, help="0: only check the losses")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those, at least 1")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--pipeline-micro-batches", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all step times to this file")
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache / "slurm_pt-benchmarks",
        help="where environments for peers are made",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
