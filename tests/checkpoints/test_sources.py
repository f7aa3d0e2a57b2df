import huggingface_hub
import pytest

from dflash_jax.checkpoints import load_target, resolve
from dflash_jax.errors import CheckpointError


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

    def download(name, allow_patterns):
        asked.append(name)
        assert "*.safetensors" in allow_patterns
        return str(golden / "recall-target")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_target("some-org/Recall-0.6M").config.vocab_size == 64
    assert asked == ["some-org/Recall-0.6M"]


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
