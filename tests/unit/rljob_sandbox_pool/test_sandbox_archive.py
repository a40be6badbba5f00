"""Trees up and down over the guest's own code, and a sandbox that sends what it likes: nothing gets out of a folder."""

import contextlib
import io
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob import sandbox_archive
from rljob.errors import SandboxError
from rljob.http1_answer import Answer
from rljob.sandbox_archive import download, upload
from rljob.sandbox_tar import Member, NonsenseError, members
from rljob_sandbox_pool.guest import archive, checks, pack, transfers
from rljob_sandbox_pool.guest.files import Files
from rljob_sandbox_pool.guest.system import User
from rljob_sandbox_pool.guest.wire import Response

PART = 1 << 20


class Box:
    """What a claimed sandbox is to the client: here the guest's code on a folder of this machine."""

    id = "box"

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, 0
        self.files = Files(User(None), str(root))

    def lose(self, reason: str) -> None:
        raise SandboxError(reason)

    async def write_file(self, path: str, data: bytes) -> None:
        self.files.write(checks.NewFile(path, 0o644, data))

    async def call(self, method: str, target: str, body: bytes = b"", **_: Any) -> Answer:
        self.calls += 1
        where = urlsplit(target)
        query = {k: v[0] for k, v in parse_qs(where.query, keep_blank_values=True).items()}
        path = self.root / query.get("path", "")
        if (method, where.path) == ("GET", "/archive"):
            return self._packed(str(path), int(query["max_bytes"]), query["after"])
        if (method, where.path) == ("PUT", "/archive"):
            path.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDONLY)
            assert len(body) <= sandbox_archive.ARCHIVE_BYTES
            for _ in archive.unpack(fd, body):
                pass
            os.close(fd)
        elif method == "GET":
            offset, num = int(query["offset"]), int(query["max_bytes"])
            return Answer(200, {}, self.files.read(str(path), num, offset))
        else:
            line, _, data = body.partition(b"\n")
            for file in checks.new_files(json.loads(line), memoryview(data)):
                self.files.write(file)
        return Answer(200, {}, b"{}")

    def _packed(self, path: str, max_bytes: int, after: str) -> Answer:
        steps = pack.pack(path, max_bytes, after, -1)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                packed: pack.Packed = end.value
                break
        replies: list[Response] = []
        transfers.send_packed(packed, replies.append)
        return Answer(200, dict(replies[0].headers), replies[0].body)


def facts(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
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
    for n in range(40):
        (tree / f"deep/{n:03}").write_bytes(os.urandom(60_000))
    (tree / "tool").write_text("#!/bin/sh\n")
    (tree / "tool").chmod(0o751)
    (tree / "deep/er/link").symlink_to("../000")
    (tree / "dangling").symlink_to("nowhere")
    os.link(tree / "deep/001", tree / "same")
    (tree / os.fsdecode(b"not \xff text %+")).write_text("odd")
    (tree / "large").write_bytes(os.urandom(3 * PART + 17))
    (tree / "deep/er").chmod(0o555)
    os.utime(tree / "deep", ns=(5, 1_234_567_890_123_456_789))
    return tree


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    """With parts so small that a small tree has several."""
    monkeypatch.setattr(sandbox_archive, "ARCHIVE_BYTES", PART)
    monkeypatch.setattr(sandbox_archive, "PART_BYTES", PART)
    (tmp_path / "box").mkdir()
    return Box(tmp_path / "box")


async def test_a_tree_goes_up_and_comes_down_the_same(box: Box, tree: Path, tmp_path: Path) -> None:
    for _ in range(2):
        await upload(box, tree, "in")
    assert facts(box.root / "in") == facts(tree)
    assert (box.root / "in/same").samefile(box.root / "in/deep/001")
    for _ in range(2):
        result = await download(box, "in", tmp_path / "out/here")
    assert facts(tmp_path / "out/here") == facts(tree)
    assert result.left_out == []
    assert (result.num_files, result.num_bytes >= 5_000_000) == (43 + 1, True)
    assert box.calls > 10


async def test_a_file_goes_up_and_comes_down(box: Box, tree: Path, tmp_path: Path) -> None:
    for name in ("tool", "large"):
        await upload(box, tree / name, f"new/folder/{name}")
        assert facts(box.root / "new/folder")[name] == facts(tree)[name]
        result = await download(box, f"new/folder/{name}", tmp_path / f"out-{name}")
        assert (tmp_path / f"out-{name}").read_bytes() == (tree / name).read_bytes()
        assert result.num_files == 1
    assert sorted(path.name for path in (box.root / "new/folder").iterdir()) == ["large", "tool"]


async def test_a_large_file_that_does_not_fit_leaves_nothing_large(
    box: Box, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = box.files.write

    def full(file: checks.NewFile) -> None:
        if file.final:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(box.files, "write", full)
    with pytest.raises(OSError, match="No space left"):
        await upload(box, tree / "large", "large")
    assert [path.stat().st_size for path in box.root.iterdir()] == [0]


async def test_an_empty_folder_goes_up_and_comes_down(box: Box, tree: Path, tmp_path: Path) -> None:
    await upload(box, tree / "empty", "void")
    assert (box.root / "void").is_dir()
    assert (await download(box, "void", tmp_path / "void")).num_files == 0
    assert (tmp_path / "void").is_dir()


@pytest.mark.parametrize("target", ["/etc", "../../etc", "here/../.."])
async def test_a_link_that_leads_out_does_not_go_up(box: Box, tree: Path, target: str) -> None:
    (tree / "a").symlink_to(target)
    with pytest.raises(ValueError, match="leads out of the folder"):
        await upload(box, tree, "in")


async def test_what_is_no_file_does_not_go_up(box: Box, tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(ValueError, match="neither a file, a folder nor a link"):
        await upload(box, tree, "in")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        await upload(box, tree / "pipe", "in")
    with pytest.raises(FileNotFoundError):
        await upload(box, tree / "none", "in")


async def test_links_that_lead_out_are_left_out(box: Box, tmp_path: Path) -> None:
    (box.root / "in/a").mkdir(parents=True)
    (box.root / "in/a/up").symlink_to("../../..")
    (box.root / "in/etc").symlink_to("/etc")
    (box.root / "in/fine").symlink_to("a")
    result = await download(box, "in", tmp_path / "out")
    assert result.left_out == ["a/up", "etc"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "fine"]


async def test_more_than_asked_for_is_refused(box: Box, tree: Path, tmp_path: Path) -> None:
    await upload(box, tree, "in")
    with pytest.raises(ValueError, match="more than was to be copied"):
        await download(box, "in", tmp_path / "out", max_bytes=PART)


class Liar(Box):
    """A sandbox that answers with what it likes."""

    def __init__(self, root: Path, answers: Callable[[int], Answer]) -> None:
        super().__init__(root)
        self.answers = answers

    async def call(self, method: str, target: str, body: bytes = b"", **_: Any) -> Answer:
        self.calls += 1
        return self.answers(self.calls)


def tar(*entries: tuple[str, dict[str, Any]]) -> bytes:
    blocks = b""
    for name, differs in entries:
        info = tarfile.TarInfo(name)
        data = differs.get("data", b"")
        info.size = len(data)
        for key, value in differs.items():
            if key != "data":
                setattr(info, key, value)
        blocks += info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)
    return blocks + bytes(1024)


def folder(data: bytes, **headers: str) -> Callable[[int], Answer]:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Answer(200, {"x-rljob-kind": "folder", **more}, data)


def file(data: bytes) -> Callable[[int], Answer]:
    return lambda _: Answer(200, {"x-rljob-kind": "file"}, data)


LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}
LIES: dict[str, Callable[[int], Answer]] = {
    "up": folder(tar(("../evil", {"data": b"x"}))),
    "absolute": folder(tar(("/tmp/evil", {"data": b"x"}))),
    "dots": folder(tar(("a/./b", {"data": b"x"}))),
    "empty part": folder(tar(("a//b", {"data": b"x"}))),
    "a NUL": folder(tar(("a", {"pax_headers": {"path": "a\0b"}}))),
    "too deep": folder(tar(("a/" * 200 + "b", {}))),
    "a device": folder(tar(("dev", {"type": tarfile.CHRTYPE}))),
    "a pipe": folder(tar(("pipe", {"type": tarfile.FIFOTYPE}))),
    "a hard link out": folder(tar(("h", {**HARD, "linkname": "../evil"}))),
    "a hard link to the machine's": folder(tar(("h", {**HARD, "linkname": "mine"}))),
    "a long name in GNU's way": folder(tarfile.TarInfo("n" * 200).tobuf(tarfile.GNU_FORMAT)),
    "no archive": folder(b"x" * 2000),
    "half a member": folder(tar(("a", {"data": b"x" * 2000}))[:1200]),
    "a size in words": folder(tar(("a", {"pax_headers": {"size": "many"}}))),
    "parts for ever": folder(tar(("a", {})), x_rljob_next="a"),
    "parts in no order": folder(tar(("a", {})), x_rljob_next="../x"),
    "two files for one": file(tar(("a", {}), ("b", {}))),
    "a large folder": folder(
        tar(("d", {"type": tarfile.DIRTYPE, "pax_headers": {"RLJOB.size": "5"}}))
    ),
    "a large second file": file(tar(("a", {}), ("b", {"pax_headers": {"RLJOB.size": "5"}}))),
    "a folder for a file": file(tar(("a", {"type": tarfile.DIRTYPE}))),
    "a link for a file": file(tar(("a", {**LINK, "linkname": "mine"}))),
    "a deep file for a file": file(tar(("a/b", {}))),
}


@pytest.mark.parametrize("answers", LIES.values(), ids=LIES.keys())
async def test_nonsense_is_an_error_and_nothing_outside_changes(
    tmp_path: Path, answers: Callable[[int], Answer]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    place = tmp_path / "out" if "folder" in str(answers(1).headers) else tmp_path / "out/got"
    with pytest.raises(SandboxError):
        await download(Liar(tmp_path, answers), "x", place)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/mine").stat().st_nlink == 1
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".rljob")]


async def test_parts_without_end_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_archive, "MAX_DOWNLOAD_FILES", 50)

    def answers(n: int) -> Answer:
        return Answer(200, {"x-rljob-kind": "folder", "x-rljob-next": f"{n:09}"}, bytes(1024))

    with pytest.raises(ValueError, match="more than was to be copied"):
        await download(Liar(tmp_path, answers), "x", tmp_path / "out")


async def test_a_large_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    large = tar(("large", {"pax_headers": {"RLJOB.size": str(1 << 30)}}))

    def answers(n: int) -> Answer:
        return Answer(200, {"x-rljob-kind": "folder"}, large if n == 1 else b"")

    with pytest.raises(SandboxError, match="shorter"):
        await download(Liar(tmp_path, answers), "x", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    with pytest.raises(ValueError, match="more than"):
        await download(Liar(tmp_path, answers), "x", tmp_path / "out", max_bytes=1 << 20)


async def test_links_on_the_way_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").symlink_to("../outside")
    for data in (
        tar(("a/file", {"data": b"x"})),
        tar(("b", {**LINK, "linkname": "c"}), ("b/file", {"data": b"x"})),
    ):
        with pytest.raises(OSError):
            await download(Liar(tmp_path, folder(data)), "x", tmp_path / "out")
    assert not any((tmp_path / "outside").iterdir())


async def test_dangerous_bits_do_not_come_down(tmp_path: Path) -> None:
    data = tar(("tool", {"mode": 0o6755}), ("dir", {"type": tarfile.DIRTYPE, "mode": 0o3777}))
    await download(Liar(tmp_path, folder(data)), "x", tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out/dir").stat().st_mode) == 0o777


WHOLE = tar(
    ("a/ü", {"data": b"x" * 600, "pax_headers": {"mtime": "5.5"}}),
    ("n" * 150, {}),
    ("dir", {"type": tarfile.DIRTYPE}),
    ("link", {**LINK, "linkname": "a"}),
    ("h", {**HARD, "linkname": "a/ü"}),
)


def test_what_python_writes_is_read() -> None:
    found: list[Member] = list(members(WHOLE))
    assert ["/".join(m.parts) for m in found] == ["a/ü", "n" * 150, "dir", "link", "h"]
    assert (found[0].mtime_ns, bytes(found[0].data)) == (5_500_000_000, b"x" * 600)
    assert (found[3].link, found[4].link) == ("a", "a/ü")
    with tarfile.open(fileobj=io.BytesIO(WHOLE)) as same:
        assert same.getnames() == ["/".join(m.parts) for m in found]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE)), st.binary(max_size=6)), max_size=5))
def test_broken_archives_are_nonsense_or_stay_within_bounds(
    changes: list[tuple[int, bytes]],
) -> None:
    data = bytearray(WHOLE)
    for at, new in changes:
        data[at : at + len(new)] = new
    total = 0
    with contextlib.suppress(NonsenseError):
        for member in members(bytes(data)):
            total += len(member.data)
            assert ".." not in member.parts
    assert total <= len(data)


NAMES = st.sampled_from(["a", "b", "a/b", "a/b/c", "b/a", "..", "a/../b", "/a", "mine"])
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
TARGETS = st.sampled_from(["a", "b", "../b", "..", "../..", "/tmp", "a/b", "../outside/file"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, KINDS, TARGETS), min_size=1, max_size=8))
async def test_no_order_of_members_gets_out(entries: list[tuple[str, bytes, str]]) -> None:
    data = tar(*((n, {"type": kind, "linkname": link}) for n, kind, link in entries))
    with tempfile.TemporaryDirectory() as at:
        root = Path(at)
        (root / "outside").mkdir()
        (root / "outside/file").write_text("outside")
        with contextlib.suppress(SandboxError, OSError):
            await download(Liar(root, folder(data)), "x", root / "out")
        assert {path.name for path in root.iterdir()} <= {"outside", "out"}
        assert (root / "outside/file").stat().st_nlink == 1
        assert [path.name for path in (root / "outside").iterdir()] == ["file"]
        for path in (root / "out").rglob("*"):
            assert f"{os.path.realpath(path)}/".startswith(f"{root / 'out'}/")
