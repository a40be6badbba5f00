"""Archives into and out of a folder: everything kept that may be, nothing outside of it, whatever the archive says."""

import contextlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_sandbox_pool.guest import archive, pack
from rljob_sandbox_pool.guest.archive import leads_outside
from rljob_sandbox_pool.guest.wire import RefusedError

T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    """All the steps; what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def unpack(root: Path, data: bytes) -> int:
    fd = os.open(root, os.O_RDONLY)
    try:
        return finish(archive.unpack(fd, data))
    finally:
        os.close(fd)


def packed(path: Path, max_bytes: int = 1 << 24, after: str | None = None) -> pack.Packed:
    return finish(pack.pack(str(path), max_bytes, after, forbidden_device=-1))


def tar(*members: tuple[str, dict[str, Any]], **options: Any) -> bytes:
    """An archive; a member is its name and what differs of a file with the content `x`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as file:
        for name, differs in members:
            info = tarfile.TarInfo(name)
            data = differs.pop(
                "data", b"x" if differs.get("type") in (None, tarfile.REGTYPE) else b""
            )
            info.size = len(data)
            for key, value in differs.items():
                setattr(info, key, value)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def facts(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        content = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        name = str(path.relative_to(root))
        found[name] = (stat.filemode(info.st_mode), info.st_mtime_ns, content)
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "deep/er").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "file").write_bytes(bytes(range(256)) * 5)
    (tree / "tool").write_text("#!/bin/sh\n")
    (tree / "tool").chmod(0o751)
    (tree / "deep/link").symlink_to("../file")
    os.link(tree / "file", tree / "deep/same")
    (tree / ("n" * 120) / ("m" * 120)).mkdir(parents=True)
    (tree / ("n" * 120) / ("m" * 120) / "long").write_text("long")
    (tree / os.fsdecode(b"not \xff text")).write_text("odd")
    (tree / "ünïcode 漢字").write_text("odd")
    (tree / "deep/er").chmod(0o555)
    os.utime(tree / "deep", ns=(5, 1_234_567_890_123_456_789))
    os.utime(tree / "deep/link", ns=(5, 5), follow_symlinks=False)
    return tree


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("outside")
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_what_goes_out_comes_in_the_same(tree: Path, target: Path) -> None:
    for _ in range(2):
        unpack(target, packed(tree).data)
        assert facts(target) == facts(tree)
        assert (target / "file").samefile(target / "deep/same")


def test_a_file_goes_out_by_its_own_name(tree: Path, target: Path) -> None:
    unpack(target, packed(tree / "tool").data)
    assert facts(target) == {"tool": facts(tree)["tool"]}
    assert not packed(tree / "tool").is_folder


@pytest.mark.parametrize(
    "options", ["--format=gnu", "--format=pax", "-S --format=gnu", "-S --format=pax"]
)
def test_archives_of_gnu_tar_come_in(tree: Path, target: Path, options: str) -> None:
    with (tree / "sparse").open("wb") as file:
        for place in (0, 1 << 20, 1 << 22):
            file.seek(place)
            file.write(b"data" * 1024)
        file.truncate((1 << 22) + 50_000)
    argv = ["tar", "-C", str(tree), "-c", *options.split(), "."]
    data = subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout
    unpack(target, data)
    whole = "--format=pax" in options
    assert {name: each[2] for name, each in facts(target).items()} == {
        name: each[2] for name, each in facts(tree).items()
    }
    if whole:
        assert facts(target)["deep"] == facts(tree)["deep"]
    if "-S" in options:
        assert (target / "sparse").stat().st_blocks * 512 < 1 << 20


def test_gnu_tar_reads_what_goes_out(tree: Path, target: Path) -> None:
    argv = ["tar", "-C", str(target), "-xp"]
    subprocess.run(argv, input=packed(tree).data, check=True, timeout=60)
    assert facts(target) == facts(tree)


LINK, HARD, FOLDER = (
    {"type": tarfile.SYMTYPE},
    {"type": tarfile.LNKTYPE},
    {"type": tarfile.DIRTYPE},
)
ESCAPES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "absolute": [("/tmp/x", {})],
    "parent": [("../outside/file", {})],
    "hidden parent": [("a/../../outside/file", {})],
    "harmless parent": [("a/../b", {})],
    "absolute folder": [("/tmp/x", FOLDER)],
    "absolute link": [("link", {**LINK, "linkname": "/etc/passwd"})],
    "link up": [("a/link", {**LINK, "linkname": "../../outside"})],
    "link by a link": [
        ("here", {**LINK, "linkname": "."}),
        ("link", {**LINK, "linkname": "here/../outside"}),
    ],
    "hard link up": [("hard", {**HARD, "linkname": "../outside/file"})],
    "absolute hard link": [("hard", {**HARD, "linkname": "/etc/passwd"})],
    "through its own link": [("in", {**LINK, "linkname": "."}), ("in/file", {})],
}


@pytest.mark.parametrize("members", ESCAPES.values(), ids=ESCAPES.keys())
def test_what_leads_outside_is_refused(
    target: Path, members: list[tuple[str, dict[str, Any]]]
) -> None:
    with pytest.raises(RefusedError) as caught:
        unpack(target, tar(("before", {}), *[(n, dict(m)) for n, m in members]))
    assert (caught.value.status, caught.value.error) == (400, "escapes")
    assert facts(target.parent / "outside").keys() == {"file"}
    if "through" not in members[0][0] and members[0][0] != "in":
        assert facts(target) == {}


def test_links_that_lie_there_are_not_followed(target: Path) -> None:
    (target / "a").symlink_to("../outside")
    (target / "b").mkdir()
    (target / "b/c").symlink_to("../../outside")
    for name in ("a/file", "b/c/file", "a/new/file"):
        with pytest.raises(RefusedError, match="is a link there"):
            unpack(target, tar((name, {})))
    with pytest.raises(RefusedError, match="is a link there"):
        unpack(target, tar(("hard", {**HARD, "linkname": "a/file"})))
    with pytest.raises(RefusedError, match="is a link there"):
        unpack(target, tar(("a", dict(FOLDER))))
    unpack(target, tar(("a", {"data": b"new"})))
    assert (target / "a").read_bytes() == b"new"
    assert (target.parent / "outside/file").read_text() == "outside"


def test_a_link_that_appears_meanwhile_is_not_followed(target: Path) -> None:
    data = tar(*((f"dir/{n}/file", {}) for n in range(50)), ("dir/file", {}))
    fd = os.open(target, os.O_RDONLY)
    steps, outside = archive.unpack(fd, data), target.parent / "outside"
    while not (target / "dir/20").exists():
        next(steps)
    (target / "dir").rename(target / "away")
    (target / "dir").symlink_to(outside)
    with pytest.raises(RefusedError, match="is a link there"):
        finish(steps)
    os.close(fd)
    assert sorted(path.name for path in outside.iterdir()) == ["file"]


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"])
def test_what_is_no_file_is_refused(target: Path, kind: bytes) -> None:
    with pytest.raises(RefusedError, match="neither a file"):
        unpack(target, tar(("before", {}), ("device", {"type": kind})))
    assert facts(target) == {}


def test_dangerous_bits_do_not_come_in(target: Path) -> None:
    unpack(target, tar(("tool", {"mode": 0o6755}), ("dir", {**FOLDER, "mode": 0o3777})))
    assert stat.S_IMODE((target / "tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "dir").stat().st_mode) == 0o777


def test_times_of_any_kind_come_in(target: Path) -> None:
    for mtime in ("nan", "inf", "-5", "1e400", "9" * 30, "5.123456789", "x"):
        data = tar(("file", {"pax_headers": {"mtime": mtime}}))
        unpack(target, data)
    data = tar(("file", {"pax_headers": {"mtime": "5.123456789"}}))
    unpack(target, data)
    assert (target / "file").stat().st_mtime_ns == 5_123_456_789


def test_a_hard_link_to_no_file_is_an_error(target: Path) -> None:
    for members in (
        [("hard", {**HARD, "linkname": "none"})],
        [("dir", dict(FOLDER)), ("hard", {**HARD, "linkname": "dir"})],
        [("link", {**LINK, "linkname": "x"}), ("hard", {**HARD, "linkname": "link"})],
    ):
        with pytest.raises(OSError):
            unpack(target, tar(*members))
        assert not (target / "hard").exists()


def test_a_file_is_not_put_over_a_folder_nor_into_a_file(target: Path) -> None:
    (target / "dir").mkdir()
    (target / "file").write_text("")
    with pytest.raises(IsADirectoryError):
        unpack(target, tar(("dir", {})))
    with pytest.raises(NotADirectoryError):
        unpack(target, tar(("file/x", {})))
    assert not [path for path in target.rglob("*") if path.name.startswith(".rljob")]


def test_a_full_disk_leaves_no_half_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(fd: int, data: bytes, place: int) -> int:
        if place:
            raise OSError(28, "No space left on device")
        return real(fd, bytes(data)[:10], place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device: 'big'"):
        unpack(target, tar(("small", {"data": b"1"}), ("big", {"data": b"x" * 100})))
    assert facts(target).keys() == {"small"}


def _long_name() -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.type = tarfile.GNUTYPE_LONGNAME
    return info.tobuf(tarfile.GNU_FORMAT)


NONSENSE = {
    "nothing": b"",
    "text": b"not an archive at all" * 100,
    "cut": tar(("file", {"data": b"x" * 5000}))[:2000],
    "followed by something": tar(("file", {}))[:1024] + b"something else" * 100,
    "a chain of long names": _long_name() * 3000,
    "a NUL in a name": tar(("file", {"pax_headers": {"path": "a\0b"}}), format=tarfile.PAX_FORMAT),
    "a NUL in a link": tar(
        ("link", {**LINK, "pax_headers": {"linkpath": "a\0b"}}), format=tarfile.PAX_FORMAT
    ),
    "a sparse file larger than any disk": tar(
        (
            "file",
            {
                "data": b"0\n".ljust(512, b"\0"),
                "pax_headers": {
                    "GNU.sparse.major": "1",
                    "GNU.sparse.minor": "0",
                    "GNU.sparse.name": "file",
                    "GNU.sparse.realsize": "9" * 20,
                },
            },
        ),
        format=tarfile.PAX_FORMAT,
    ),
    "a negative size": tar(("file", {"pax_headers": {"size": "-512"}})),
    "a size in words": tar(("file", {"pax_headers": {"size": "large"}})),
    "no name": tar(("./", {})),
    "compressed": b"\x1f\x8b" + bytes(2000),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_refused(target: Path, data: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        unpack(target, data)
    assert (caught.value.status, caught.value.error) == (400, "bad_request")


def test_the_number_of_members_is_bounded(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    with pytest.raises(RefusedError) as caught:
        unpack(target, tar(*((f"{n}", {}) for n in range(4))))
    assert caught.value.status == 413


def test_a_depth_without_bound_is_refused(tree: Path, target: Path) -> None:
    with pytest.raises(RefusedError, match="deeper"):
        unpack(target, tar(("d/" * 200 + "x", {})))
    (tree / ("d/" * 140)).mkdir(parents=True)
    with pytest.raises(RefusedError, match="deeper"):
        packed(tree)


def test_what_does_not_fit_is_refused_or_comes_in_parts(tree: Path, target: Path) -> None:
    (tree / "large").write_bytes(b"l" * 50_000)
    with pytest.raises(RefusedError, match="more than 20480 bytes"):
        packed(tree, 20_480)
    after: str | None = ""
    num = 0
    while after is not None:
        part = packed(tree, 20_480, after)
        assert len(part.data) <= 20_480
        assert part.next is None or part.next > after
        unpack(target, part.data)
        after, num = part.next, num + 1
    assert num > 1
    assert (target / "large").read_bytes() == b""
    missing = {name for name in facts(tree) if facts(target).get(name) != facts(tree)[name]}
    assert missing == {"large"}


def test_a_part_tells_of_files_that_fit_into_none(tree: Path) -> None:
    (tree / "large").write_bytes(b"l" * 50_000)
    with tarfile.open(fileobj=io.BytesIO(packed(tree, 20_480, "file").data)) as part:
        (member,) = [each for each in part if pack.LARGE in each.pax_headers]
    assert (member.name, member.pax_headers[pack.LARGE]) == ("large", "50000")


def test_what_is_read_neither_follows_links_nor_blocks(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    (tree / "etc").symlink_to("/etc")
    with tarfile.open(fileobj=io.BytesIO(packed(tree).data)) as whole:
        names = whole.getnames()
    assert "etc" in names
    assert not [name for name in names if name.startswith("etc/") or name == "pipe"]
    with pytest.raises(PermissionError):
        packed(tree / "pipe")


def test_what_changes_meanwhile_does_not_break_an_archive(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in "abcdef":
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_text(name)
    steps = pack.pack(str(tree), 1 << 20, None, -1)
    next(steps)
    for name in "cd":
        (tree / name / "file").unlink()
        (tree / name).rmdir()
    (tree / "c").symlink_to("/etc")
    (tree / "e/file").unlink()
    (tree / "e/file").symlink_to("/etc/passwd")
    with tarfile.open(fileobj=io.BytesIO(finish(steps).data)) as whole:
        assert [m.name for m in whole if m.isreg()] == ["a/file", "b/file", "f/file"]


def test_a_forbidden_file_system_is_left_out(tmp_path: Path) -> None:
    device = Path("/proc").stat().st_dev
    with pytest.raises(PermissionError):
        finish(pack.pack("/proc/self/environ", 1 << 20, None, device))
    data = finish(pack.pack("/proc/self", 1 << 20, None, device)).data
    assert not data.strip(b"\0")


@pytest.mark.parametrize(
    ("depth", "target", "outside"),
    [
        (0, "file", False),
        (0, "./a//b", False),
        (0, "..", True),
        (1, "..", False),
        (1, "../..", True),
        (2, "../../x", False),
        (5, "a/..", True),
        (0, "/x", True),
    ],
)
def test_where_links_lead(depth: int, target: str, outside: bool) -> None:
    assert leads_outside(depth, target) == outside


NAMES = st.sampled_from(["a", "b", "a/b", "a/b/c", "b/a", ".", "./a", "..", "a/..", "/a", "a/./b"])
MEMBERS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]),
        st.sampled_from(["a", "b", "../b", "..", "../..", "/tmp", "a/b", ".", "../outside/file"]),
    ),
    min_size=1,
    max_size=8,
)


def unpack_anything(make: Callable[[], bytes]) -> None:
    """Into a folder with a link outwards; nothing outside may change."""
    with tempfile.TemporaryDirectory() as at:
        root, outside = Path(at, "in", "target"), Path(at, "in", "outside")
        root.mkdir(parents=True)
        outside.mkdir()
        (outside / "file").write_text("outside")
        (root / "b").symlink_to("../outside")
        with contextlib.suppress(RefusedError, OSError):
            unpack(root, make())
        assert facts(Path(at, "in")).keys() >= {"outside", "outside/file", "target"}
        assert {path.name for path in Path(at, "in").iterdir()} == {"target", "outside"}
        assert [path.name for path in outside.iterdir()] == ["file"]
        assert (outside / "file").read_text() == "outside"
        assert (outside / "file").stat().st_nlink == 1
        for path in root.rglob("*"):
            if path.is_symlink() and path != root / "b":
                depth = len(path.relative_to(root).parts) - 1
                assert not leads_outside(depth, str(path.readlink()))


@settings(max_examples=80, deadline=None)
@given(MEMBERS)
def test_no_order_of_members_gets_out(members: list[tuple[str, bytes, str]]) -> None:
    unpack_anything(
        lambda: tar(*((n, {"type": kind, "linkname": link}) for n, kind, link in members))
    )


WHOLE = tar(
    ("a/b", {"pax_headers": {"mtime": "5.5", "path": "a/ü"}}),
    ("n" * 150, {}),
    ("dir", dict(FOLDER)),
    ("link", {**LINK, "linkname": "a"}),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8)), max_size=4
    )
)
def test_no_broken_archive_gets_out_or_hangs(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(WHOLE)
    for place, new in changes:
        data[place : place + len(new)] = new
    unpack_anything(lambda: bytes(data))
