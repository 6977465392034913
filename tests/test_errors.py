import pytest

from slurm_pt import errors
from slurm_pt.errors import ConfigError, Problem, SlurmPtError, nearest


def test_one_problem_is_one_line_with_key_value_rule_and_fix():
    error = ConfigError([Problem("slurm.mem", None, "needed", "set slurm.mem=1G")])
    assert str(error) == "slurm.mem=null: needed. To fix: set slurm.mem=1G."


def test_many_problems_are_counted_and_listed():
    error = ConfigError([Problem("a", 1, "x", "y"), Problem("b", "2", "x", "y")])
    assert str(error).splitlines() == [
        "2 problems in the configuration:",
        "  - a=1: x. To fix: y.",
        "  - b=2: x. To fix: y.",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", ""),
        ("hiden_size", "; did you mean hidden_size?"),
        ("beta3", "; did you mean beta2 or beta1?"),
    ],
)
def test_the_nearest_known_names_are_proposed(name, hint):
    assert nearest(name, ["hidden_size", "beta1", "beta2"]) == hint


def test_every_error_a_user_can_mend_has_an_exit_code_and_stands_in_the_tree():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and c is not Problem]
    for cls in classes:
        assert issubclass(cls, SlurmPtError)
        assert cls.exit_code in {0, 1, 2}
        assert f"{cls.__name__} " in errors.__doc__
