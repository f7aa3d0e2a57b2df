"""Directories and files that nobody but their owner may change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dflash_jax import compile_cache
from dflash_jax.checkpoints import resolve
from dflash_jax.checkpoints.staging import new_directory
from dflash_jax.errors import CheckpointError
from dflash_jax.jobs.config import JobConfig
from dflash_jax.private import cache_directory, exposure, private_directory, read_private
from dflash_jax.training import TrainConfig
from dflash_jax.writing import replace_file


def test_a_private_directory_and_all_that_is_made_on_the_way_are_for_their_owner_only(tmp_path):
    made = private_directory(tmp_path / "a" / "b")
    assert made == tmp_path.resolve() / "a" / "b" == private_directory(made)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (made, made.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_is_refused(tmp_path, mode):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(PermissionError, match=f"others may write to {directory} .mode {mode:o}"):
        private_directory(directory)
    below = directory / "below"
    if mode == 0o1777:
        assert private_directory(below) == below, "a sticky directory keeps others from exchanging what is in it"
    else:
        with pytest.raises(PermissionError, match=f"others may write to {directory}"):
            private_directory(below)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given_away", ["shared", "shared/below"])
def test_a_directory_of_another_user_is_refused(tmp_path, given_away):
    (tmp_path / "shared" / "below").mkdir(parents=True)
    os.chown(tmp_path / given_away, 12345, 12345)
    with pytest.raises(PermissionError, match=f"{tmp_path / given_away} belongs to another user .uid 12345"):
        private_directory(tmp_path / "shared" / "below")


def test_a_link_counts_for_what_it_leads_to(tmp_path):
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert private_directory(tmp_path / "link") == tmp_path.resolve() / "open"
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError):
        private_directory(tmp_path / "link")


def test_only_plain_files_of_this_user_alone_are_read(tmp_path):
    file = tmp_path / "a"
    replace_file(file, "content", mode=0o600)
    assert read_private(file) == b"content" and exposure(file.resolve()) is None
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in ("link", "pipe"):
        with pytest.raises(OSError):
            read_private(tmp_path / other)
    file.chmod(0o620)
    with pytest.raises(PermissionError, match="is not a file that only this user may write"):
        read_private(file)
    if os.getuid() == 0:
        file.chmod(0o600)
        os.chown(file, 12345, 12345)
        with pytest.raises(PermissionError):
            read_private(file)


@pytest.fixture
def homeless(monkeypatch):
    """A user whom the system does not know, in an environment that says nothing."""
    for name in ("HOME", "DFLASH_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])


def test_without_a_home_there_are_no_caches_and_what_needs_one_says_so(homeless, monkeypatch):
    with pytest.raises(OSError, match=r"no home directory; \$DFLASH_JAX_CACHE must name"):
        cache_directory()
    with pytest.raises(
        CheckpointError, match=r"^wheel:m==1.0 cannot be kept anywhere: this user has no home directory"
    ):
        resolve("wheel:m==1.0")
    monkeypatch.setattr(compile_cache, "_setting", lambda name: "/tmp")
    assert compile_cache.own_cache() is None
    monkeypatch.setattr(compile_cache, "_setting", lambda name: None if name.endswith("dir") else True)
    compile_cache.enable_compile_cache()


def test_the_home_of_nobody_is_a_name_like_any(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint '~nobody-at-all/m'"):
        resolve("~nobody-at-all/m")
    with pytest.raises(CheckpointError, match="~nobody-at-all/m"), new_directory(Path("~nobody-at-all/m")):
        raise CheckpointError("~nobody-at-all/m was made")


def test_a_tilde_is_the_home_in_every_path_of_a_config(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"target": {"path": "~/t"}, "input": {"path": "~/i"}, "output": {"path": "~/o"}}
    job = JobConfig.model_validate(values)
    assert [job.target.path, job.input.path, job.output.path] == [f"{tmp_path}/{name}" for name in "tio"]
    run = TrainConfig.model_validate(
        {"target": "~/t", "output": "~/o", "draft": {}, "data": {"path": "~/d"}, "optimiser": {"steps": 1}}
    )
    assert [run.target, str(run.output), str(run.data.path)] == [f"{tmp_path}/{name}" for name in "tod"]
