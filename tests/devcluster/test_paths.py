from pathlib import Path

import pytest

from slurm_pt.devcluster import DevCluster, default_folder
from slurm_pt.devcluster.files import claim_folder
from slurm_pt.devcluster.paths import paths_in
from slurm_pt.errors import DevClusterError


def test_the_folder_is_the_named_one_or_one_per_user():
    assert default_folder({"SLURM_PT_DEVCLUSTER": "/a/b"}) == Path("/a/b")
    assert default_folder({"XDG_RUNTIME_DIR": "/run/user/5"}).parent == Path("/run/user/5")
    assert default_folder({}).parent == Path("/tmp")


def test_a_folder_too_long_for_sockets_is_refused():
    with pytest.raises(DevClusterError, match="with a shorter path"):
        paths_in("/tmp/" + "x" * 80)


@pytest.mark.parametrize("name", ["a b", "a%n", "a'b", "a#b", "a\nb", "a[1]"])
def test_a_folder_that_slurms_files_cannot_hold_is_refused(name):
    with pytest.raises(DevClusterError, match="letters, digits"):
        paths_in(f"/tmp/{name}")


def test_a_folder_with_files_of_somebodys_is_never_taken_over(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DevClusterError, match="does not exist yet"):
        claim_folder(tmp_path)
    assert not DevCluster(tmp_path).down()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DevClusterError, match=r"file/dc cannot be used"):
        claim_folder(tmp_path / "file" / "dc")
