"""Gives packages that are plain source the metadata of an installed distribution: `dist_info.py PYPROJECT FOLDER`.

Writes `FOLDER/NAME-VERSION.dist-info` with the version and those entry points whose package lies in FOLDER, so that
`importlib.metadata` finds in an image what an installation would have. The standard library is enough.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Write the metadata."""
    pyproject, folder = Path(sys.argv[1]), Path(sys.argv[2])
    project = tomllib.loads(pyproject.read_text())["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points(project, folder))


def entry_points(project: dict, folder: Path) -> str:
    """The sections of entry_points.txt."""
    groups = dict(project.get("entry-points", {}))
    if "scripts" in project:
        groups["console_scripts"] = project["scripts"]
    lines: list[str] = []
    for group, named in groups.items():
        # names of plugins are asked for where their package is not: by the operator, which refuses unknown ones
        everywhere = group.startswith("rljob.") and group != "rljob.commands"
        here = {
            k: v for k, v in named.items() if everywhere or (folder / v.partition(".")[0]).is_dir()
        }
        if here:
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in here.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
