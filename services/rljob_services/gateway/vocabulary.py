"""Text to token ids and back, without letting text pass for control tokens.

A tokenizer reads `<|im_end|>` as a control token wherever it stands, in a chat template or in a
file that the model has just printed. So before a message is rendered, each such literal in it is
replaced by a placeholder that nobody can guess (`mark`); after rendering, every literal that is
left is the template's own. `encode` puts the marked ones back, cut in two, and hands the tokenizer
each side of the cut by itself: no string that it sees holds a literal that the template did not
write.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer

from rljob.errors import TaskError

_Json = TypeVar("_Json")


class ForgedTokenError(TaskError):
    """Text of a message would have been read as a control token."""


class Vocabulary:
    """A tokenizer whose control tokens only the chat template can write.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        # White space that a tokenizer lists as added tokens (Gemma) controls nothing; a single character cannot be cut.
        added = {
            i: t
            for i, t in tokenizer.get_added_tokens_decoder().items()
            if len(t.content.strip()) > 1
        }
        self._control_ids = frozenset(added)
        self._id_of = {token.content: i for i, token in added.items()}
        self._literals = list(self._id_of)
        self._any = _pattern(self._literals)
        self._special = _pattern([token.content for token in added.values() if token.special])
        nonce = secrets.token_hex(8)
        self._mark = f"x{nonce}n%dx"
        self._marked = re.compile(f"x{nonce}n([0-9]+)x")

    def token_id(self, token: str) -> int | None:
        """The id of one token; None where the vocabulary has none of that name."""
        return self._tokenizer.token_to_id(token)

    def mark(self, value: _Json, *, only_special: bool = False) -> _Json:
        """`value` (JSON) with every control literal in its strings replaced by a placeholder.

        Args:
            value: Text, or lists and objects of it.
            only_special: Leave mark-up that is no turn boundary (`<think>`): templates look for it
            in assistant messages.
        """
        return self._mark_value(value, self._special if only_special else self._any)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text.

        Raises:
            ForgedTokenError: the tokenizer saw a control token that is not in the text, or the other way round.
        """
        ids: list[int] = []
        for piece in self._pieces(text):
            ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        written = [self._id_of[match.group()] for match in self._any.finditer(text)]
        if [i for i in ids if i in self._control_ids] != written:
            raise ForgedTokenError(
                "a message holds text that the tokenizer would read as a control token"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens kept."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def control_ids(self, text: str) -> list[int]:
        """The control tokens that `text` spells, in order."""
        return [self._id_of[match.group()] for match in self._any.finditer(text)]

    def _mark_value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(self._placeholder, value)
        if isinstance(value, dict):
            return {
                self._mark_value(key, pattern): self._mark_value(item, pattern)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._mark_value(item, pattern) for item in value]
        return value

    def _placeholder(self, match: re.Match[str]) -> str:
        return self._mark % self._literals.index(match.group())

    def _pieces(self, text: str) -> list[str]:
        """`text` with its placeholders put back, cut inside each."""
        parts = self._marked.split(text)  # text, literal's index, text, literal's index, …, text
        pieces, rest = [], parts[0]
        for index, following in zip(parts[1::2], parts[2::2], strict=True):
            literal = self._literals[int(index)]
            half = len(literal) // 2
            pieces.append(rest + literal[:half])
            rest = literal[half:] + following
        return [*pieces, rest]


def _pattern(literals: list[str]) -> re.Pattern[str]:
    """Matches as tokenizers do: leftmost, then longest."""
    alternatives = sorted(map(re.escape, literals), key=len, reverse=True)
    return re.compile("|".join(alternatives) if alternatives else r"(?!)")
