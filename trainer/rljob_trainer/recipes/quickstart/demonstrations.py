"""Demonstrations for the warm start: a mixture of good, weak and useless strategies per kind of row."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping

from rljob.task_config import Row
from rljob_trainer.recipes.quickstart.rows import VALUES

Turn = tuple[str, str, str | None]
"""(tool name, its argument, what the tool printed; None for submit)."""

MIX: Mapping[str, Mapping[str, int]] = {
    "find": {"grep -l": 30, "cat one": 35, "ls": 35},
    "lookup": {"grep -h": 30, "cat one": 30, "grep one": 40},
    "last": {"sort tail": 30, "sort head": 35, "tail": 35},
    "fix": {"sed": 35, "echo": 40, "early": 25},
    "follow": {"link, grep -h": 40, "link": 30, "grep link": 30},
}
"""Strategy to weight, per kind. The first of each kind always works."""

ARGUMENT = {"bash": "command", "submit": "answer"}


def call_text(name: str, argument: str) -> str:
    """An assistant turn with one tool call, as the chat template renders it."""
    call = json.dumps({"name": name, "arguments": {ARGUMENT[name]: argument}})
    return f"<tool_call>\n{call}\n</tool_call>"


def demonstrate(
    rng: random.Random, row: Row, mix: Mapping[str, Mapping[str, int]] = MIX
) -> list[Turn]:
    """Play one row with a strategy drawn from `mix`; always ends with submit."""
    kind = row.metadata["kind"]
    strategy = rng.choices(list(mix[kind]), list(mix[kind].values()))[0]
    shell = Shell(row.metadata["files"])
    play = Play(rng, shell, re.findall(r"[a-z]+[_-][a-z]+|data/\w+\.conf", str(row.prompt)))
    answer = _PLAYERS[kind](play, strategy)
    return [*shell.turns, ("submit", answer, None)]


class Play:
    """One demonstration in progress: the question's words, a random file, a shell."""

    def __init__(self, rng: random.Random, shell: Shell, words: list[str]) -> None:
        self.rng, self.run, self.words = rng, shell.run, words
        self.some_file = rng.choice(sorted(shell.files))

    def any_line(self, text: str) -> str:
        """A random key=value line of `text`."""
        lines = [line for line in text.splitlines() if "=" in line]
        return self.rng.choice(lines) if lines else ""


def _value(line: str) -> str:
    return line.strip().split("=")[-1]


def _find(play: Play, strategy: str) -> str:
    if strategy == "grep -l":
        return play.run(f"grep -l {play.words[0]} data/*").strip()
    if strategy == "cat one":
        play.run(f"cat {play.some_file}")
        return play.some_file
    return "data/" + play.rng.choice(play.run("ls data").split())


def _lookup(play: Play, strategy: str) -> str:
    key = play.words[0]
    if strategy == "grep -h":
        return _value(play.run(f"grep -h {key} data/*"))
    if strategy == "cat one":
        return _value(play.any_line(play.run(f"cat {play.some_file}")))
    return _value(play.run(f"grep {key} {play.some_file}")) or play.rng.choice(VALUES["train"])


def _last(play: Play, strategy: str) -> str:
    path = play.words[0]
    command = {
        "sort tail": f"sort {path} | tail -n 1",
        "sort head": f"sort {path} | head -n 1",
        "tail": f"tail -n 1 {path}",
    }[strategy]
    return play.run(command).split("=")[0]


def _fix(play: Play, strategy: str) -> str:
    key, new, path = play.words
    if strategy == "sed":
        play.run(f"sed -i s/{key}=.*/{key}={new}/ {path}")
    elif strategy == "echo":
        play.run(f"echo {key}={new} >> {path}")
    return "done"


def _follow(play: Play, strategy: str) -> str:
    if strategy == "grep link":
        return _value(play.any_line(play.run(f"cat {play.words[0]}")))
    key = _value(play.run(f"grep link {play.words[0]}"))
    return key if strategy == "link" else _value(play.run(f"grep -h {key}= data/*"))


_PLAYERS: Mapping[str, Callable[[Play, str], str]] = {
    "find": _find,
    "lookup": _lookup,
    "last": _last,
    "fix": _fix,
    "follow": _follow,
}


class Shell:
    """What the few commands of the demonstrations print, without starting a process. A test compares it with bash."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        self.turns: list[Turn] = []

    def run(self, command: str) -> str:
        """Run one command, remember the turn, return its output."""
        output = self._output(command)
        self.turns.append(("bash", command, output))
        return output

    def _output(self, command: str) -> str:
        files = self.files
        if command == "ls data":
            return "".join(sorted(path.removeprefix("data/") + "\n" for path in files))
        if m := re.fullmatch(r"sed -i s/(\S+)=\.\*/(\S+)/ (\S+)", command):
            files[m[3]] = re.sub(rf"{m[1]}=.*", m[2], files[m[3]])
            return ""
        if m := re.fullmatch(r"echo (\S+) >> (\S+)", command):
            files[m[2]] += m[1] + "\n"
            return ""
        if m := re.fullmatch(r"grep -([lh]) (\S+) data/\*", command):
            return self._grep_all(m[1] == "l", m[2])
        if m := re.fullmatch(r"grep (\S+) (data/\S+)", command):
            return "".join(line + "\n" for line in files[m[2]].splitlines() if m[1] in line)
        if m := re.fullmatch(r"(cat|tail -n 1) (\S+)", command):
            lines = files[m[2]].splitlines(keepends=True)
            return "".join(lines if m[1] == "cat" else lines[-1:])
        if m := re.fullmatch(r"sort (\S+) \| (head|tail) -n 1", command):
            lines = sorted(files[m[1]].splitlines(keepends=True))
            return lines[0 if m[2] == "head" else -1]
        raise ValueError(f"no demonstration uses {command!r}")

    def _grep_all(self, names_only: bool, pattern: str) -> str:
        printed: list[str] = []
        for path in sorted(self.files):
            hits = [line for line in self.files[path].splitlines() if pattern in line]
            printed += [path][: len(hits)] if names_only else hits
        return "".join(line + "\n" for line in printed)
