"""Every schedule on gloo processes gives the loss and the gradients of one process."""

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

SCHEDULES = [
    ("gpipe", 1),
    ("one_f_one_b", 1),
    ("zero_bubble", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 3),
]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_a_pipeline_gives_the_loss_and_gradients_of_one_process_for_any_micro_batch_count(pp):
    # Fewer than, as many as, not a multiple of, and several times as many as there are ranks.
    counts = sorted({1, 2, pp, pp + 1, 2 * pp, 2 * pp + 1})
    runs = [(name, virtual, count) for name, virtual in SCHEDULES for count in counts]
    results = run_ranks(pp, "tests.parallel.cases:pipelines_match", runs)
    for rank, found in enumerate(results):
        for run, row in zip(runs, found, strict=True):
            assert (row["loss"] > 0.0) == (rank == pp - 1), run  # the last stage alone knows it
            off = [row["loss off"], row["evaluated off"], row["gradient off"]]
            assert off == pytest.approx([0.0] * 3, abs=1e-14), run


GPT_RUNS = {
    2: [
        ({"schedule": "gpipe"}, 3),
        ({"schedule": "one_f_one_b", "stage_layers": [3, 5]}, 1),
        ({"schedule": "zero_bubble"}, 1),
        ({"schedule": "zero_bubble", "stage_layers": [5, 3]}, 5),
        ({"schedule": "interleaved", "virtual_stages": 2}, 1),
        ({"schedule": "interleaved", "virtual_stages": 4}, 2),
        ({"schedule": "interleaved", "virtual_stages": 2, "stage_layers": [1, 3, 2, 2]}, 5),
    ],
    4: [
        ({"schedule": "gpipe"}, 6),
        ({"schedule": "one_f_one_b", "stage_layers": [1, 2, 3, 2]}, 6),
        ({"schedule": "zero_bubble"}, 2),
        ({"schedule": "zero_bubble", "stage_layers": [1, 3, 3, 1]}, 8),
        ({"schedule": "interleaved", "virtual_stages": 2}, 3),
        ({"schedule": "interleaved", "virtual_stages": 2}, 4),
        ({"schedule": "interleaved", "virtual_stages": 2}, 6),
        ({"schedule": "interleaved", "virtual_stages": 2}, 8),
    ],
}


@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_trains_the_gpt_of_one_process(pp):
    runs = [(row | {"tied": tied}, count) for row, count in GPT_RUNS[pp] for tied in (True, False)]
    results = run_ranks(pp, "tests.parallel.cases:gpt_matches", runs)
    for found in results:
        for run, row in zip(runs, found, strict=True):
            assert row["loss"] == pytest.approx(0.0, abs=1e-12), run
            assert row["evaluated"] == pytest.approx(0.0, abs=1e-12), run
            assert row["gradient"] == pytest.approx(0.0, abs=1e-12), run
    # 8 layers of 12 parameters, token and position embeddings, final norm, and the head or copy.
    for index in range(len(runs)):
        assert sum(found[index]["parameters"] for found in results) == 8 * 12 + 2 + 2 + 1
