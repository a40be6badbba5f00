"""A folder of the image that commands may change: remembered as it began, put back by a reset, verified.

    seed (read-only, as the image has it) ──► folder      manifest: what every entry was, in the guest's memory

Contents are always compared: whoever owns a file sets its times as he likes, and on a file system in memory a write
through a mapping does not even change the one time that nobody can set. While this is at work nobody else is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from rljob_sandbox_pool.guest import folders
from rljob_sandbox_pool.guest.folders import FOLDER, READ, Copy, TooLargeError
from rljob_sandbox_pool.guest.seed import copy_folder
from rljob_sandbox_pool.guest.system import User

MAX_EVIDENCE = 5
_CHUNK = 1 << 20
_NUM_FACT_BYTES, _NUM_CONTENT_BYTES = 12, 16
_ROOT = ""


class Writable:
    """One such folder. The rights are the agent's.

    Args:
        user: Whom the folder belongs to.
        path: The folder.
        seed: What it begins with.
    """

    def __init__(self, user: User, path: str, seed: str) -> None:
        self.path = path
        self._user, self._seed = user, seed
        self._manifest: dict[str, bytes] = {}
        """Per path below the folder: a digest of what `lstat` tells, then one of its content."""
        self._first: dict[str, str] = {}
        """Per file with several names: the first of them."""
        self._names: dict[tuple[int, int], str] = {}
        """While at work: the name under which an inode was met first."""
        self._restored: set[str] = set()
        self._root = os.stat(path)
        self._root_flags = 0
        """Of all that is in it, too."""

    def fill(self, max_bytes: int) -> None:
        """Copy the seed into the folder, which is empty. Raises OSError, TooLargeError."""
        with self._user.borrowed():
            copy_folder(Copy(max_bytes), self._seed, self.path)

    def remember(self) -> None:
        """What the folder is now is what a reset brings back. Raises OSError, TooLargeError."""
        with self._user.borrowed():
            self._root = os.stat(self.path)
            with _opened(self.path) as at:
                self._root_flags = folders.flags(at)
            for path, at, name in self._walk():
                if len(self._manifest) > folders.MAX_ENTRIES:
                    raise TooLargeError(f"{self.path}: more than {folders.MAX_ENTRIES} files")
                info = os.stat(name, dir_fd=at, follow_symlinks=False)
                self._manifest[path] = _facts(info) + _content(at, name, info)
                if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                    self._first[path] = self._names.setdefault((info.st_dev, info.st_ino), path)
            self._forget_reads()
        self._names.clear()

    def restore(self) -> list[str]:
        """Put back what differs, remove what is new, look again. Returns what still differs, in words."""
        with self._user.borrowed():
            try:
                seed = os.open(self._seed, FOLDER)
                try:
                    self._restore(seed)
                finally:
                    os.close(seed)
                found = self._differences() if self._restored else []
                self._forget_reads()
                return found
            except OSError as error:
                return [f"{self.path}: {error.filename or ''}: {error.strerror}"]
            except (TooLargeError, folders.UnreadableError) as error:
                return [f"{self.path}: its seed has changed: {error or 'not readable'}"]
            finally:
                self._names.clear()
                self._restored.clear()

    def _forget_reads(self) -> None:
        """When something was last read, or is said to have been, is what an owner can tell the next one by."""
        for path, at, name in self._walk():
            time_ns = os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime_ns
            try:
                os.utime(name, ns=(time_ns, time_ns), dir_fd=at, follow_symlinks=False)
            except PermissionError:
                if path:  # the folder itself may be another's, and then says nothing
                    raise

    def _walk(self) -> Iterator[tuple[str, int, str]]:
        """Every entry, folders before what they hold: path below the folder, descriptor of its folder, name."""
        with _opened(self.path) as at:
            yield _ROOT, at, "."
            yield from self._inside(at, _ROOT, 0)

    def _inside(self, at: int, path: str, depth: int) -> Iterator[tuple[str, int, str]]:
        if depth > folders.MAX_DEPTH:
            raise TooLargeError(f"{self.path}: deeper than {folders.MAX_DEPTH} folders")
        for name in sorted(os.listdir(at)):
            yield f"{path}/{name}", at, name
            if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                inner = os.open(name, FOLDER | os.O_NOATIME, dir_fd=at)
                try:
                    yield from self._inside(inner, f"{path}/{name}", depth + 1)
                finally:
                    os.close(inner)

    def _restore(self, seed: int) -> None:
        os.chmod(self.path, stat.S_IMODE(os.stat(self.path).st_mode) | 0o700)
        root = os.open(self.path, FOLDER)
        try:
            self._folder(root, seed, _ROOT, root)
        finally:
            os.close(root)

    def _folder(self, at: int, seed: int, path: str, root: int) -> None:
        # First of all: new files would inherit an access list, and flags.
        if _content(at, ".", os.fstat(at)) != self._manifest[path][_NUM_FACT_BYTES:]:
            _detach(at)
            folders.set_flags(at, self._root_flags)
            self._restored.add(path)
        wanted = [name for name in sorted(os.listdir(seed)) if f"{path}/{name}" in self._manifest]
        for name in set(os.listdir(at)).difference(wanted):
            folders.remove(at, name)
            self._restored.add(path)
        for name in wanted:
            info = os.stat(name, dir_fd=seed, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                self._inner(at, seed, name, f"{path}/{name}", root)
            else:
                self._single(at, seed, name, f"{path}/{name}", root)
        if not self._is_as_it_was(at, ".", path):
            self._restored.add(path)
            like = os.fstat(seed) if path else self._root
            mode = folders.kept_mode(like) if path else stat.S_IMODE(like.st_mode)
            if path:
                folders.give_owner(at, ".", like)
            _give_facts(at, mode, (like.st_atime_ns, like.st_mtime_ns))

    def _inner(self, at: int, seed: int, name: str, path: str, root: int) -> None:
        mode = _mode(at, name)
        if mode is None or not stat.S_ISDIR(mode):
            self._make_room(at, name, path)
            os.mkdir(name, 0o700, dir_fd=at)
        elif mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=at)
        inner, inner_seed = os.open(name, FOLDER, dir_fd=at), -1
        try:
            inner_seed = os.open(name, FOLDER, dir_fd=seed)
            self._folder(inner, inner_seed, path, root)
        finally:
            os.close(inner)
            if inner_seed >= 0:
                os.close(inner_seed)

    def _single(self, at: int, seed: int, name: str, path: str, root: int) -> None:
        """A file or a link. Of a file with several names the later ones have to be the first one's inode."""
        first = self._first.get(path, path)
        if first != path:
            if not _same(root, first.lstrip("/"), at, name):
                self._make_room(at, name, path)
                source = first.lstrip("/")
                os.link(source, name, src_dir_fd=root, dst_dir_fd=at, follow_symlinks=False)
        elif not self._is_as_it_was(at, name, path):
            self._make_room(at, name, path)
            info = os.stat(name, dir_fd=seed, follow_symlinks=False)
            folders.copy_single(seed, at, name, info)

    def _make_room(self, at: int, name: str, path: str) -> None:
        self._restored.add(path)
        if _mode(at, name) is not None:
            folders.remove(at, name)

    def _is_as_it_was(self, at: int, name: str, path: str) -> bool:
        try:
            info = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return False
        known = self._manifest[path]
        return (
            known[:_NUM_FACT_BYTES] == _facts(info)
            and _content(at, name, info) == known[_NUM_FACT_BYTES:]
        )

    def _differences(self) -> list[str]:
        """What `lstat` tells of everything, and the contents of what was put back."""
        found: list[str] = []
        num_seen = 0
        for path, at, name in self._walk():
            num_seen += 1
            known = self._manifest.get(path)
            info = os.stat(name, dir_fd=at, follow_symlinks=False)
            same = known is not None and known[:_NUM_FACT_BYTES] == _facts(info)
            if same and known is not None and path in self._restored:
                same = known[_NUM_FACT_BYTES:] == _content(at, name, info)
            if not same:
                found.append(f"{self.path}{path} is not as it was")
        if num_seen < len(self._manifest):
            found.append(f"{self.path}: {len(self._manifest) - num_seen} files are missing")
        return found[:MAX_EVIDENCE]


@contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        fd = os.open(path, FOLDER | os.O_NOATIME)
    except PermissionError:
        fd = os.open(path, FOLDER)  # another's
    try:
        yield fd
    finally:
        os.close(fd)


def _detach(at: int) -> None:
    """Remove what an owner can attach to a folder."""
    for name in os.listxattr(at):
        if name.startswith(("user.", "system.posix_acl")):
            os.removexattr(at, name)


def _give_facts(at: int, mode: int, times: tuple[int, int]) -> None:
    os.fchmod(at, mode)
    os.utime(at, ns=times)


def _facts(info: os.stat_result) -> bytes:
    is_folder = stat.S_ISDIR(info.st_mode)
    size, num_links = (0, 0) if is_folder else (info.st_size, info.st_nlink)
    owner = (info.st_uid, info.st_gid)
    # As text: a time may be any number at all.
    told = repr((info.st_mode, *owner, size, info.st_mtime_ns, num_links)).encode()
    return blake2b(told, digest_size=_NUM_FACT_BYTES).digest()


def _content(at: int, name: str, info: os.stat_result) -> bytes:
    """Digest of what an entry holds, and of what is attached to it."""
    digest = blake2b(digest_size=_NUM_CONTENT_BYTES)
    if stat.S_ISLNK(info.st_mode):
        digest.update(os.fsencode(os.readlink(name, dir_fd=at)))
    elif stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
        flags = READ if stat.S_ISREG(info.st_mode) else FOLDER
        fd = os.open(name, flags, dir_fd=at)
        try:
            if stat.S_ISREG(info.st_mode):
                _read_into(digest, fd, min(_CHUNK, info.st_size + 1))
            digest.update(b"%d" % folders.flags(fd))
            for attribute in sorted(os.listxattr(fd)):
                digest.update(os.fsencode(attribute) + os.getxattr(fd, attribute))
        finally:
            os.close(fd)
    return digest.digest()


def _read_into(digest: blake2b, fd: int, num_bytes: int) -> None:
    while data := os.read(fd, num_bytes):
        digest.update(data)
        if len(data) < num_bytes:
            break


def _mode(at: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _same(root: int, first: str, at: int, name: str) -> bool:
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.stat(first, dir_fd=root, follow_symlinks=False), found)
