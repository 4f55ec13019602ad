"""A file or checkpoint that is missing or damaged is an error that names it."""

import shutil
from pathlib import Path

import pytest

import tfmp

_RECORDINGS = Path(__file__).parent.parent / "recordings"


@pytest.mark.graph
def test_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("model.ckpt", "model.keras", "model.weights.h5"):
        with pytest.raises(FileNotFoundError, match=f"there is no .*{name}"):
            tfmp.read_loss_scale_state(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"holds neither a checkpoint .* nor a SavedModel"):
        tfmp.read_loss_scale_state(tmp_path)


@pytest.mark.graph
@pytest.mark.parametrize("name", ["scales/keras3_stock/model.keras", "scales/keras3_stock/model.weights.h5"])
@pytest.mark.parametrize("length", [0, 100, 9000])
def test_broken_file_is_named(name: str, length: int, tmp_path: Path) -> None:
    path = tmp_path / Path(name).name
    path.write_bytes((_RECORDINGS / name).read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{path.name} cannot be read, it may be damaged or incomplete"):
        tfmp.read_loss_scale_state(path)


@pytest.mark.graph
@pytest.mark.parametrize("broken", ["index", "data-00000-of-00001"])
@pytest.mark.parametrize("length", [None, 0, 40])
def test_broken_checkpoint_is_named(broken: str, length: int | None, tmp_path: Path) -> None:
    for path in (_RECORDINGS / "scales/keras3_stock").glob("model.ckpt.*"):
        shutil.copy(path, tmp_path)
    part = tmp_path / f"model.ckpt.{broken}"
    whole = part.read_bytes()
    part.unlink()
    if length is not None:
        part.write_bytes(whole[:length])
    expected = FileNotFoundError if (broken, length) == ("index", None) else ValueError
    with pytest.raises(expected, match=r"model\.ckpt"):
        tfmp.read_loss_scale_state(tmp_path / "model.ckpt")
