"""The library on the node: in place at one stroke, never written over."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.host_library import CannotBeLoaded, install, put_into_place
from gpushare_spawner.agent.sessions.environment import Libraries


@pytest.fixture
def shipped(tmp_path: Path) -> Libraries:
    """What came with the agent."""
    folder = tmp_path / "image"
    folder.mkdir()
    for name in ("libgpushare.so", "libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).write_bytes(f"{name}, first version".encode())
    return Libraries(preload=folder / "libgpushare.so", simulated_driver=folder)


def test_everything_is_installed_for_everybody_to_read(shipped: Libraries, tmp_path: Path) -> None:
    found = install(shipped, tmp_path / "host" / "lib")
    assert found.preload.read_bytes() == b"libgpushare.so, first version"
    assert found.preload_list.read_text() == f"{found.preload}\n"
    assert found.simulated_driver is not None
    assert (found.simulated_driver / "libcuda.so.1").read_bytes() == b"libcuda.so.1, first version"
    assert found.preload.stat().st_mode & 0o777 == 0o755
    assert found.preload.parent.stat().st_mode & 0o777 == 0o755


def test_nothing_is_touched_where_it_is_there_already(shipped: Libraries, tmp_path: Path) -> None:
    first = install(shipped, tmp_path / "lib").preload.stat()
    again = install(shipped, tmp_path / "lib").preload.stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)


def test_who_has_the_old_one_mapped_keeps_it(shipped: Libraries, tmp_path: Path) -> None:
    path = install(shipped, tmp_path / "lib").preload
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        shipped.preload.write_bytes(b"libgpushare.so, second version, a longer one")
        install(shipped, tmp_path / "lib")
        assert mapped[:] == b"libgpushare.so, first version"
        assert os.fstat(file.fileno()).st_ino != path.stat().st_ino
    assert path.read_bytes() == b"libgpushare.so, second version, a longer one"


def test_a_shorter_version_is_no_longer_one_cut_off(shipped: Libraries, tmp_path: Path) -> None:
    install(shipped, tmp_path / "lib")
    shipped.preload.write_bytes(b"new")
    assert install(shipped, tmp_path / "lib").preload.read_bytes() == b"new"


def test_a_folder_or_a_link_in_its_place_makes_way(shipped: Libraries, tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    # the container runtime makes a folder where a file to be mounted is missing
    (lib / "libgpushare.so").mkdir(parents=True)
    assert install(shipped, lib).preload.is_file()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (lib / "libgpushare.so").unlink()
    (lib / "libgpushare.so").symlink_to(precious)
    assert not install(shipped, lib).preload.is_symlink()
    assert precious.read_text() == "precious"


def test_an_installation_that_fails_changes_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.options.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        put_into_place(b"new", target, 0o755)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_installation_left_is_cleared(shipped: Libraries, tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libgpushare.new").write_bytes(b"half")
    install(shipped, lib)
    assert sorted(path.name for path in lib.iterdir()) == ["ld.so.preload", "libgpushare.so", "simgpu"]


def test_a_file_system_that_nothing_can_be_loaded_from_is_refused(
    shipped: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mounted:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.options.os.statvfs", lambda _path: Mounted())
    with pytest.raises(CannotBeLoaded, match="noexec"):
        install(shipped, tmp_path / "lib")
