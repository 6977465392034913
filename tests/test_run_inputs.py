from __future__ import annotations

from pathlib import Path

import pytest

from slurm_pt.errors import ConfigError, RunFolderError
from slurm_pt.run_dir import open_run
from slurm_pt.run_inputs import create_run, run_dir_of
from tests.builders import commit_step, make_point, make_run, read_job, small_config


def test_a_run_is_named_after_its_configuration_and_nothing_is_created(tmp_path):
    point = make_point(tmp_path)
    assert point.run.path.parent == tmp_path
    assert point.run.name.startswith("gpt-")
    assert len(point.run.name) == len("gpt-") + 10
    assert list(tmp_path.iterdir()) == []


def test_a_relative_root_and_a_home_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    cfg = small_config()
    assert run_dir_of(read_job(run_root="runs"), cfg).path.parent == tmp_path / "runs"
    assert run_dir_of(read_job(run_root="~/runs"), cfg).path.parent == Path("/home/me/runs")


@pytest.mark.parametrize("root", ["/a\\b", "/a\nb", "/a\rb"])
def test_a_root_that_slurm_cannot_write_logs_into_is_refused(root):
    with pytest.raises(ConfigError, match=r"run_root=.*backslash.*set another run_root"):
        run_dir_of(read_job(run_root=root), small_config())


def test_creating_a_run_twice_keeps_what_it_has_f37(tmp_path):
    run = make_run(tmp_path)
    run.new_attempt()
    commit_step(run, 5)
    inputs = [path.read_text() for path in (run.config, run.spec, run.plan)]
    assert make_run(tmp_path) == run
    assert [path.read_text() for path in (run.config, run.spec, run.plan)] == inputs
    assert run.committed_step() == 5
    assert len(run.list_attempts()) == 1
    assert open_run(run.path) == run


def test_a_root_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    point = make_point(tmp_path / "file")
    with pytest.raises(RunFolderError, match=r"run_root=.*file: .*cannot be made: Not a dir"):
        create_run(point.run, cfg=point.cfg, spec={}, plan={})
