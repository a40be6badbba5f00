"""Folders of an image, copied before a sandbox starts: what is kept, what is left out, what is refused."""

import os
import stat
import sys
from pathlib import Path

import pytest

from rljob_sandbox_pool.guest import folders, seed


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with one of everything."""
    image = tmp_path / "image"
    (image / "deep/down").mkdir(parents=True)
    (image / "file").write_bytes(bytes(range(256)))
    (image / "tool").write_text("#!/bin/sh\n")
    (image / "tool").chmod(0o755)
    (image / "deep/down/link").symlink_to("../../file")
    (image / "out").symlink_to("/etc/passwd")
    os.link(image / "file", image / "deep/hard")
    os.utime(image / "file", ns=(1, 1_234_567_890_123_456_789))
    os.utime(image / "deep", ns=(1, 999_999_999))
    (image / "deep/down").chmod(0o750)
    return image


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("seed", "target"):
        (tmp_path / name).mkdir()
    return tmp_path / "seed", tmp_path / "target"


def facts(root: Path) -> dict[str, object]:
    found = {}
    for path in [root, *root.rglob("*")]:
        info = path.lstat()
        content = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        size = 0 if path.is_dir() else info.st_size
        name = str(path.relative_to(root))
        found[name] = (stat.filemode(info.st_mode), size, info.st_mtime_ns, content)
    return found


def test_both_copies_are_as_the_image(image: Path, copies: tuple[Path, Path]) -> None:
    assert seed.main([*map(str, copies), "/no/such/folder", str(image)]) == 0
    for copy in copies:
        assert facts(copy / "1") == facts(image)
        assert (copy / "1/file").samefile(copy / "1/deep/hard")
        assert not any((copy / "0").iterdir())


def test_nothing_keeps_a_set_uid_bit_and_everything_is_readable(
    image: Path, copies: tuple[Path, Path]
) -> None:
    (image / "tool").chmod(0o6711)
    (image / "file").chmod(0o040)
    assert seed.main([*map(str, copies), str(image)]) == 0
    assert stat.S_IMODE((copies[0] / "0/tool").stat().st_mode) == 0o711
    assert stat.S_IMODE((copies[0] / "0/file").stat().st_mode) == 0o440


def test_what_is_no_file_is_left_out_and_said(
    image: Path, copies: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(image / "pipe")
    assert seed.main([*map(str, copies), str(image)]) == 0
    assert not (copies[1] / "0/pipe").exists()
    assert f"{image}: 1 left out, as pipe" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root")
def test_what_cannot_be_read_is_left_out(
    image: Path, copies: tuple[Path, Path], tmp_path: Path
) -> None:
    (image / "secret").write_text("root only")
    (image / "secret").chmod(0o600)
    (image / "closed").mkdir(mode=0o700)
    (image / "closed/inside").write_text("")
    for path in [image, *image.parents][:4]:
        path.chmod(0o755)
    for path in copies:
        os.chown(path, 12345, 12345)
    words = tmp_path / "words"
    words.touch()
    words.chmod(0o666)
    child = os.fork()
    if child == 0:
        os.setgid(12345)
        os.setuid(12345)
        sys.stderr = words.open("w", buffering=1)
        os._exit(seed.main([*map(str, copies), str(image)]))
    assert os.waitpid(child, 0)[1] == 0
    assert words.read_text() == f"{image}: 3 left out, as closed/\n" * 2
    assert sorted(path.name for path in (copies[0] / "0").iterdir()) == [
        "deep",
        "file",
        "out",
        "tool",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "usage"),
        (["--max-mib=many", "a", "b"], "usage"),
        (["--max-mib=0", "SEED", "TARGET", "IMAGE"], "more than 0 MiB"),
        (["SEED", "TARGET", "IMAGE/file"], "Not a directory"),
        (["SEED/none", "TARGET", "IMAGE"], "No such file"),
        (["SEED", "TARGET", "IMAGE/around"], "a link leads from there"),
        (["SEED", "TARGET", "IMAGE/around/deep"], "a link leads from there"),
    ],
)
def test_a_failure_is_one_line(
    argv: list[str],
    words: str,
    image: Path,
    copies: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (image / "around").symlink_to(image)
    names = {"SEED": str(copies[0]), "TARGET": str(copies[1]), "IMAGE": str(image)}
    for name, path in names.items():
        argv = [word.replace(name, path) for word in argv]
    assert seed.main(argv) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_tree_past_the_bounds_is_refused(
    image: Path, copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_ENTRIES", 3)
    assert seed.main([*map(str, copies), str(image)]) == 1


def test_a_tree_deeper_than_the_bound_is_refused(
    image: Path, copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_DEPTH", 1)
    assert seed.main([*map(str, copies), str(image)]) == 1


def test_removing_takes_any_mode_and_depth(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_RDONLY)
    inner = "tree"
    (tmp_path / f".rljob-empty-1-{os.getpid()}/x/y").mkdir(parents=True)
    for _ in range(40):
        (tmp_path / inner).mkdir()
        inner += "/" + "x" * 60
    (tmp_path / "tree/file").write_text("")
    (tmp_path / "tree/link").symlink_to(tmp_path)
    (tmp_path / "tree").chmod(0)
    folders.remove(at, "tree")
    folders.empty(at)
    os.close(at)
    assert not any(tmp_path.iterdir())
