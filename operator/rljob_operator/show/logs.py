"""`rljob logs`: what components wrote, together or one by one, followed or not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rljob_operator.drivers.folder import RunFolder
from rljob_operator.drivers.process import tail
from rljob_operator.show.runs import find, unknown

_LOOK_EVERY_SECONDS = 0.2


def main(
    component: str | None, *, follow: bool, lines: int, name: str | None, runs_dir: Path
) -> None:
    """Print, and with `follow` go on until the run has ended or the person stops it."""
    folder = find(name, runs_dir)
    names = sorted(path.stem for path in folder.logs.glob("*.log"))
    if component is not None and component not in names:
        raise unknown("component", component, names)
    chosen = [component] if component else names
    places = {
        each: folder.log(each).stat().st_size if folder.log(each).exists() else 0 for each in chosen
    }
    for each in chosen:
        _print(each, tail(folder.log(each), lines) if lines else [], many=component is None)
    if follow:
        _follow(folder, component, places)


def _follow(folder: RunFolder, component: str | None, places: dict[str, int]) -> None:
    while True:
        alive = folder.alive
        for each in (
            [component] if component else sorted(path.stem for path in folder.logs.glob("*.log"))
        ):
            places[each] = _new_lines(
                folder.log(each), each, places.get(each, 0), many=component is None
            )
        if not alive:
            return
        time.sleep(_LOOK_EVERY_SECONDS)


def _new_lines(log: Path, name: str, place: int, *, many: bool) -> int:
    """Print whole lines after byte `place`; where they end."""
    with log.open("rb") as file:
        file.seek(place)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    _print(name, whole.decode(errors="replace").splitlines(), many=many)
    return place + len(whole)


def _print(name: str, lines: list[str], *, many: bool) -> None:
    for line in lines:
        sys.stdout.write(f"{name:13}│ {line}\n" if many else f"{line}\n")
    sys.stdout.flush()
