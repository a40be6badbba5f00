"""Whatever was done to a folder of the image, a reset brings back what it was, and says so where it cannot."""

import contextlib
import mmap
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_sandbox_pool.guest import folders
from rljob_sandbox_pool.guest.folders import MAX_DEPTH, TooLargeError
from rljob_sandbox_pool.guest.system import User
from rljob_sandbox_pool.guest.writable import Writable

Facts = dict[str, tuple[object, ...]]


def make_seed(seed: Path) -> None:
    (seed / "pkg/deep").mkdir(parents=True)
    (seed / "pkg/a.py").write_text("a = 1\n")
    (seed / "pkg/deep/b.bin").write_bytes(bytes(range(256)) * 20)
    (seed / "tool").write_text("#!/bin/sh\n")
    (seed / "tool").chmod(0o755)
    (seed / "pkg/link").symlink_to("a.py")
    (seed / "out").symlink_to("/etc")
    os.link(seed / "pkg/a.py", seed / "same")
    (seed / "pkg/deep").chmod(0o750)


def facts(root: Path) -> Facts:
    found: Facts = {}
    inodes: dict[int, str] = {}
    for path in sorted([root, *root.rglob("*")]):
        info, name = path.lstat(), str(path.relative_to(root))
        content = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        first = "" if path.is_dir() else inodes.setdefault(info.st_ino, name)
        found[name] = (stat.filemode(info.st_mode), info.st_mtime_ns, content, first)
    return found


class Folder:
    """A seed, the folder made of it, and what it was."""

    def __init__(self, at: Path, owner: tuple[int, int] = (-1, -1)) -> None:
        self.seed, self.path, self.outside = at / "seed", at / "folder", at / "outside"
        make_seed(self.seed)
        for path in self.seed.rglob("*"):
            os.chown(path, *owner, follow_symlinks=False)
        self.path.mkdir()
        self.outside.mkdir()
        (self.outside / "file").write_text("outside")
        self.writable = Writable(User(None), str(self.path), str(self.seed))
        self.writable.fill(1 << 20)
        self.writable.remember()
        self.was = facts(self.path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_it_begins_as_its_seed(folder: Folder) -> None:
    assert facts(folder.path) == facts(folder.seed)
    assert folder.writable.restore() == []


def forge_content(folder: Folder) -> None:
    file = folder.path / "tool"
    info = file.stat()
    file.write_text("#!/bin/no\n")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def forge_by_mapping(folder: Folder) -> None:
    with (folder.path / "pkg/deep/b.bin").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        memory[0] = 99
        memory.close()


def escape_by_link(folder: Folder) -> None:
    shutil.rmtree(folder.path / "pkg")
    (folder.path / "pkg").symlink_to(folder.outside)


def escape_by_link_of_a_file(folder: Folder) -> None:
    (folder.path / "tool").unlink()
    (folder.path / "tool").symlink_to(folder.outside / "file")


def replace_file_by_folder(folder: Folder) -> None:
    (folder.path / "same").unlink()
    (folder.path / "same/with/things").mkdir(parents=True)
    (folder.path / "same/with").chmod(0)


def strange_things(folder: Folder) -> None:
    os.mkfifo(folder.path / "pkg/pipe")
    os.link(folder.path / "tool", folder.path / "pkg/deep/another-name")
    (folder.path / os.fsdecode(b"not \xff text")).mkdir()
    os.utime(folder.path / "pkg/a.py", (2**36, 2**36))


def break_hard_link(folder: Folder) -> None:
    data = (folder.path / "same").read_bytes()
    info = (folder.path / "same").stat()
    (folder.path / "same").unlink()
    (folder.path / "same").write_bytes(data)
    os.utime(folder.path / "same", ns=(info.st_atime_ns, info.st_mtime_ns))


def close_everything(folder: Folder) -> None:
    for path in sorted(folder.path.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(0)
    folder.path.chmod(0)


def empty_it(folder: Folder) -> None:
    for path in folder.path.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize(
    "harm",
    [
        forge_content,
        forge_by_mapping,
        escape_by_link,
        escape_by_link_of_a_file,
        replace_file_by_folder,
        strange_things,
        break_hard_link,
        close_everything,
        empty_it,
    ],
    ids=lambda harm: harm.__name__,
)
def test_harm_is_undone(folder: Folder, harm: Callable[[Folder], None]) -> None:
    harm(folder)
    assert folder.writable.restore() == []
    assert facts(folder.path) == folder.was
    assert facts(folder.outside).keys() == {".", "file"}
    assert (folder.outside / "file").read_text() == "outside"
    assert folder.writable.restore() == []


def test_what_is_attached_to_files_goes(folder: Folder) -> None:
    for path in (folder.path, folder.path / "pkg", folder.path / "tool"):
        try:
            os.setxattr(path, "user.note", b"left behind")
        except OSError:
            pytest.skip("this file system attaches nothing")
    assert folder.writable.restore() == []
    for path in (folder.path, folder.path / "pkg", folder.path / "tool"):
        assert "user.note" not in os.listxattr(path)


def test_no_message_is_left_in_times_of_reading(folder: Folder) -> None:
    paths = [folder.path, *folder.path.rglob("*")]
    for path in paths:
        info = path.lstat()
        os.utime(path, ns=(2_400_000_000 * 10**9 + 7, info.st_mtime_ns), follow_symlinks=False)
    assert folder.writable.restore() == []
    for path in paths:
        assert path.lstat().st_atime_ns == path.lstat().st_mtime_ns
    assert facts(folder.path) == folder.was


def test_flags_of_files_and_folders_go(folder: Folder) -> None:
    touched = [folder.path, folder.path / "pkg", folder.path / "tool"]
    for path in touched:
        set_flags(path, 0x40)
    if not get_flags(folder.path):
        pytest.skip("this file system has no flags")
    (folder.path / "pkg/a.py").unlink()
    assert folder.writable.restore() == []
    assert not [p for p in [folder.path, *folder.path.rglob("*")] if get_flags(p)]
    assert facts(folder.path) == folder.was


def set_flags(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        folders.set_flags(fd, flags)
    os.close(fd)


def get_flags(path: Path) -> int:
    if path.is_symlink():
        return 0
    fd = os.open(path, os.O_RDONLY)
    try:
        return folders.flags(fd)
    finally:
        os.close(fd)


def test_an_access_list_that_new_files_inherit_goes(folder: Folder) -> None:
    entries = [(1, 7, -1), (2, 7, 1234), (4, 7, -1), (16, 7, -1), (32, 7, -1)]
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, who & 0xFFFFFFFF) for tag, bits, who in entries
    )
    try:
        os.setxattr(folder.path / "pkg", "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("this file system has no access lists")
    (folder.path / "pkg/a.py").unlink()
    shutil.rmtree(folder.path / "pkg/deep")
    assert folder.writable.restore() == []
    assert facts(folder.path) == folder.was
    assert not [p for p in folder.path.rglob("*") if not p.is_symlink() and os.listxattr(p)]


def test_a_seed_that_has_changed_is_evidence(folder: Folder) -> None:
    (folder.seed / "tool").write_text("another tool")
    (folder.path / "tool").unlink()
    assert folder.writable.restore() == [f"{folder.path}/tool is not as it was"]


def test_a_seed_that_is_gone_is_evidence(folder: Folder) -> None:
    shutil.rmtree(folder.seed)
    (evidence,) = folder.writable.restore()
    assert "No such file" in evidence


def test_a_file_that_the_seed_has_lost_is_evidence(folder: Folder) -> None:
    (folder.seed / "tool").unlink()
    assert folder.writable.restore() == [f"{folder.path}: 1 files are missing"]


def test_a_full_disk_is_evidence(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", "tool")

    (folder.path / "tool").unlink()
    monkeypatch.setattr(os, "sendfile", full)
    assert folder.writable.restore() == [f"{folder.path}: tool: No space left on device"]


def test_a_folder_too_deep_is_not_remembered(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (folder.path / "/".join("d" * (MAX_DEPTH + 2))).mkdir(parents=True)
    with pytest.raises(TooLargeError, match="deeper"):
        Writable(User(None), str(folder.path), str(folder.seed)).remember()


NAMES = ["pkg", "tool", "same", "out", "pkg/a.py", "pkg/deep", "pkg/deep/b.bin", "pkg/new", "new/x"]
STEPS = st.tuples(
    st.sampled_from(["write", "unlink", "mkdir", "symlink", "link", "rename", "chmod", "times"]),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.integers(0, 0o777),
)


def do(root: Path, step: tuple[str, str, str, int]) -> None:
    """One thing that a command could do; what the system refuses it does not."""
    verb, name, other, number = step
    path = root / name
    match verb:
        case "write" if not path.is_symlink():
            path.write_bytes(b"%d" % number)
        case "unlink":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        case "mkdir":
            path.mkdir(parents=True)
        case "symlink":
            path.symlink_to(["/etc", "../..", other][number % 3])
        case "link":
            os.link(root / other, path, follow_symlinks=False)
        case "rename":
            (root / other).rename(path)
        case "chmod" if not path.is_symlink():
            path.chmod(number)
        case "times":
            os.utime(path, ns=(number, number), follow_symlinks=False)
        case _:
            pass


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_any_steps_are_undone(steps: list[tuple[str, str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as at:
        folder = Folder(Path(at))
        for step in steps:
            try:
                do(folder.path, step)
            except (OSError, shutil.Error):
                continue
        assert folder.writable.restore() == []
        assert facts(folder.path) == folder.was


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owners_come_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path, owner=(1234, 5678))
    assert (folder.path / "tool").stat().st_uid == 1234
    for path in [folder.path / "pkg", folder.path / "tool"]:
        os.chown(path, 1, 1)
    (folder.path / "out").unlink()
    assert folder.writable.restore() == []
    for name in ("pkg", "tool", "out", "pkg/a.py"):
        info = (folder.path / name).lstat()
        assert (info.st_uid, info.st_gid) == (1234, 5678)
