"""The rows of the quick start: three small key=value files, one question, an exact verifier.

    find    which file sets KEY                       one command, then submit its path
    lookup  the value of KEY                          one command, then submit the value
    last    the last key of FILE in order             one command, then submit the key
    fix     set KEY to VALUE in FILE                  one command, then submit "done"; the file is checked
    follow  the value of the key that FILE links to   two commands, then submit the value

Keys are ADJECTIVE_ANIMAL and values STONE-TREE. The tokenizer knows every word, but each pair belongs to one split (by
hash), so validation rows hold only keys and values that neither the demonstrations nor training rows contain.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from rljob.task_config import Row

ADJECTIVES = (
    "bold brave bright calm clear cold cool dark dry early fair fast fine firm fresh grand happy keen kind large late "
    "light loud lucky neat noble plain proud quick quiet rapid rich sharp slow small soft solid steep strong warm"
).split()
ANIMALS = (
    "ant badger bat bear beetle boar cat crab crane crow deer dog dove duck eagle elk falcon finch fox frog goat goose "
    "hare hawk heron horse lark lion lynx mole moose mouse newt otter owl panda quail raven robin shark"
).split()
STONES = (
    "agate amber basalt beryl chalk clay coal copper coral flint garnet gold granite iron ivory jade jasper lead "
    "marble nickel onyx opal pearl pewter quartz ruby sand silver slate steel tin topaz zinc"
).split()
TREES = (
    "acacia alder apple ash aspen bamboo beech birch cedar cherry cypress ebony elder elm fir hazel holly juniper "
    "laurel lemon lime linden mango maple oak olive palm peach pear pine plum poplar rowan spruce teak walnut willow "
    "yew"
).split()
FILES = (
    "api auth batch cache cron db disk edge gate host jobs log mail main net proxy queue site store web"
).split()
KINDS = ("find", "lookup", "last", "fix", "follow")
SYSTEM_PROMPT = "Work in the shell, then submit."
TASK_NAME = "shell"
"""What every row's `task` says: the manifest must configure a task of this name."""


def _split_of(pair: str) -> str:
    return "validation" if hashlib.sha256(pair.encode()).digest()[0] % 5 == 0 else "train"


def _pairs(first: Sequence[str], joint: str, second: Sequence[str]) -> dict[str, list[str]]:
    pairs = [f"{a}{joint}{b}" for a in first for b in second]
    return {split: [p for p in pairs if _split_of(p) == split] for split in ("train", "validation")}


KEYS = _pairs(ADJECTIVES, "_", ANIMALS)
VALUES = _pairs(STONES, "-", TREES)


def make_row(rng: random.Random, split: str, kind: str | None = None) -> Row:
    """Draw one row of split "train" or "validation"."""
    kind = kind or rng.choice(KINDS)
    paths = [f"data/{name}.conf" for name in rng.sample(FILES, 3)]
    keys, values = rng.sample(KEYS[split], 9), rng.sample(VALUES[split], 10)
    pairs = list(zip(keys, values, strict=False))
    table = {path: pairs[3 * i : 3 * i + 3] for i, path in enumerate(paths)}
    path = rng.choice(paths)
    key, value = rng.choice(table[path])
    lines = {p: [f"{k}={v}" for k, v in rows] for p, rows in table.items()}
    expect: dict[str, str] = {}
    match kind:
        case "find":
            prompt, answer = f"Which file in data sets {key}?", path
        case "lookup":
            prompt, answer = f"What is the value of {key} in data?", value
        case "last":
            prompt, answer = f"Which key is last in the order of {path}?", max(table[path])[0]
        case "fix":
            new = values[9]
            prompt, answer = f"Set {key} to {new} in {path}.", "done"
            expect[path] = _text([f"{k}={new if k == key else v}" for k, v in table[path]])
        case _:
            start = rng.choice([p for p in paths if p != path])
            lines[start].insert(rng.randrange(4), f"link={key}")
            prompt, answer = f"What is the value of the key that {start} links to?", value
    files = {p: _text(rows) for p, rows in lines.items()}
    metadata = {"kind": kind, "files": files, "answer": answer, "expect": expect}
    return Row(task=TASK_NAME, prompt=prompt, metadata=metadata)


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def make_rows(count: int, split: str, seed: int) -> list[Row]:
    """Rows of one split, kinds in rotation, a pure function of the arguments."""
    rng = random.Random(f"{split}/{seed}")
    return [make_row(rng, split, KINDS[i % len(KINDS)]) for i in range(count)]
