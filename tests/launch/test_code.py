from __future__ import annotations

from slurm_pt.launch.code import digest_code


def test_f13_the_digest_is_of_the_programs_text(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("one")
    first = digest_code(program)
    assert first == digest_code(program)
    program.write_text("two")
    assert digest_code(program) != first
    assert digest_code(None) == digest_code(tmp_path / "is not there")
    assert len(first) == 12
