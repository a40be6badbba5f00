"""The guest with an interpreter, a loader and libraries of its own: runs in any image, an empty one included.

    python -m rljob_sandbox_pool.bundle DEST          when an image is built; standard library only, Linux with glibc

    DEST/bin/python3                    this interpreter
    DEST/lib/loader, DEST/lib/*.so.*    the loader that it names, and every library that it and its extensions need
    DEST/lib/python3.X/                 what the guest imports of the standard library, compiled; the guest's package

Sourceless .pyc files: half the files to copy into every sandbox, and nothing to compile where the copy is read-only.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path

PACKAGE = "rljob_sandbox_pool.guest"
ENTRY = f"from {PACKAGE}.pod import main; main()"
_SEED_ENTRY = f"import sys; from {PACKAGE}.seed import main; sys.exit(main())"
_ALWAYS = "os io abc site codecs encodings.utf_8 encodings.latin_1 encodings.ascii encodings.idna traceback linecache"
"""What an interpreter imports by itself, by name or for an error."""
_NEVER = (
    "tkinter test unittest pydoc doctest pdb idlelib asyncio multiprocessing email http readline bz2 lzma"
).split()
"""What modules import only when they are run as programs, or for guests that we do not have."""
_PT_INTERP = 3


def build(dest: Path) -> None:
    """Make the bundle. Raises OSError, ValueError."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = dest / "lib" / version
    (dest / "bin").mkdir(parents=True)
    (stdlib / "lib-dynload").mkdir(parents=True)
    python = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    shutil.copy2(python, dest / "bin" / "python3")
    binaries = [python]
    for name, path in sorted(_modules().items()):
        if path.suffix == ".py":
            _compile(path, stdlib, name)
        else:
            shutil.copy2(path, stdlib / "lib-dynload" / path.name)
            binaries.append(path)
    loader = _loader(python)
    shutil.copy2(os.path.realpath(loader), dest / "lib" / "loader")
    for name, library in _libraries(loader, binaries).items():
        shutil.copy2(os.path.realpath(library), dest / "lib" / name)


def command(folder: str) -> list[str]:
    """What starts the guest of a bundle that lies in `folder`."""
    return _python(folder, ENTRY)


def check_command(folder: str) -> list[str]:
    """What does nothing, in any image."""
    return _python(folder, "pass")


def seed_command(
    folder: str, seed: str, target: str, paths: Sequence[str], *, max_mib: int
) -> list[str]:
    """What copies writable folders before the guest starts: path number n to `seed`/n and to `target`/n."""
    return [*_python(folder, _SEED_ENTRY), f"--max-mib={max_mib}", seed, target, *paths]


def _python(folder: str, code: str) -> list[str]:
    library_path = f"{folder}/lib"
    python = [f"{folder}/bin/python3", "-I", "-S", "-c", code]
    return [f"{library_path}/loader", "--library-path", library_path, *python]


def _modules() -> dict[str, Path]:
    """Every module that the guest may import, by name: source or extension."""
    stdlib = sysconfig.get_path("stdlib")
    extensions = [
        path for path in (f"{stdlib}/lib-dynload", sysconfig.get_path("platstdlib")) if path
    ]
    finder = ModuleFinder([stdlib, *extensions, str(_package_folder().parents[1])], excludes=_NEVER)
    for name in [*_ALWAYS.split(), f"{PACKAGE}.pod", f"{PACKAGE}.seed"]:
        finder.import_hook(name)
    files = {name: getattr(module, "__file__", None) for name, module in finder.modules.items()}
    found = {name: Path(file) for name, file in files.items() if file}
    # The pool manager around the guest's package is not the guest's.
    found.pop(PACKAGE.partition(".")[0], None)
    return found


def _package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(f"{PACKAGE} is not installed beside this file")
    return Path(spec.origin).parent


def _compile(source: Path, stdlib: Path, name: str) -> None:
    target = stdlib.joinpath(*name.split("."))
    target = target / "__init__.pyc" if source.name == "__init__.py" else target.with_suffix(".pyc")
    target.parent.mkdir(parents=True, exist_ok=True)
    py_compile.compile(
        str(source),
        cfile=str(target),
        dfile=f"{name}.py",
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _loader(program: Path) -> Path:
    """The loader that a program names in its ELF header. Raises ValueError."""
    data = program.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        raise ValueError(f"{program} is no 64-bit ELF program")
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, num_entries = struct.unpack_from("<HH", data, 54)
    for at in range(table, table + entry_size * num_entries, entry_size):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", data, at)
        if kind == _PT_INTERP:
            return Path(data[offset : offset + size].rstrip(b"\0").decode())
    raise ValueError(
        f"{program} names no loader: build the bundle with a dynamically linked python"
    )


def _libraries(loader: Path, binaries: list[Path]) -> dict[str, Path]:
    """What the loader would load for them, by the names they ask for, as it says itself. Raises ValueError."""
    found: dict[str, Path] = {}
    for binary in binaries:
        argv = [str(loader), "--list", str(binary)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        for line in done.stdout.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            if arrow and rest.startswith("/"):
                found[name.rpartition("/")[2]] = Path(rest.split(" (")[0])
            elif arrow:
                raise ValueError(f"{binary} needs {name}, which is not there")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rljob_sandbox_pool.bundle DEST")
    build(Path(sys.argv[1]))
