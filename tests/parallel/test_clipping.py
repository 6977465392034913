import math

import pytest

from slurm_pt.parallel.gradient_norm import clip_factor


@pytest.mark.parametrize(
    ("grad_norm", "max_norm", "expected"),
    [
        pytest.param(0.5, 1.0, 1.0, id="below the bound"),
        pytest.param(4.0, 1.0, 1.0 / (4.0 + 1e-6), id="above the bound"),
        pytest.param(4.0, None, 1.0, id="no bound"),
        pytest.param(0.0, 1.0, 1.0, id="no gradient"),
        pytest.param(math.inf, 1.0, 0.0, id="overflow"),
    ],
)
def test_clip_factor_is_that_of_torch(grad_norm, max_norm, expected):
    assert clip_factor(grad_norm, max_norm) == expected
