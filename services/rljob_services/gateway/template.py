r"""The model's chat template: conversations to token ids, in whole or as what new messages add.

A continuation is proved, not assumed. The template is rendered with and without the new messages;
only where the shorter text is a prefix of the longer does the rest become the delta. A template
that rewrites the past (Qwen3 drops earlier reasoning once a new user message arrives) fails that,
and the session opens a new chain.

    rendered without:  [user …] <|im_start|>assistant\n said <|im_end|>\n
    rendered with:     [user …] <|im_start|>assistant\n said <|im_end|>\n [tool …] <|im_start|>assistant\n
    kept as ids:       └──────────── the chain, as sampled ─────────┘
    the delta:                                                       └─ \n [tool …] <|im_start|>assistant\n
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rljob.errors import TaskError, UserError
from rljob_services.gateway.vocabulary import Vocabulary

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_PROBE = "k7Qz2"
_MODEL_PATH = "spec.model.source"


class TemplateError(TaskError):
    """The chat template refuses the conversation."""


class ChatTemplate:
    """Chat template and tokenizer of one model.

    Args:
        source: The template (Jinja).
        vocabulary: The tokenizer.
        special_tokens: `bos_token` and the like, as the template names them.
        stop_token_ids: What ends a turn, beside the token with which the template closes one.
    """

    def __init__(
        self,
        source: str,
        vocabulary: Vocabulary,
        special_tokens: Mapping[str, str],
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.vocabulary = vocabulary
        self._special_tokens = dict(special_tokens)
        self._template = _environment().from_string(source, globals=_globals())
        self._closing = self._find_closing()
        self._closing_length = len(vocabulary.encode(self._closing or ""))
        closing_ids = vocabulary.control_ids(self._closing or "")[:1]
        self.stop_token_ids = tuple(dict.fromkeys([*stop_token_ids, *closing_ids]))

    @property
    def can_continue(self) -> bool:
        """Whether any conversation can go on as the same chain; without it every turn is a chain of its own."""
        return self._closing is not None

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        """Token ids of a whole conversation, up to where the assistant speaks.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        return self.vocabulary.encode(self.render(messages, tools, is_prompt=True))

    def encode_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        num_known: int,
        last_token: int,
    ) -> list[int] | None:
        """Token ids that `messages[num_known:]` add to a chain, up to where the assistant speaks again.

        Args:
            messages: The whole conversation.
            tools: Its tools.
            num_known: How many of them the chain holds; the last of those is what the assistant said.
            last_token: The last token that was sampled; a turn that was cut off is closed first.

        Returns:
            The ids; None where the template is not prefix-stable here, so that a new chain must be opened.
        """
        whole = self.render(messages, tools, is_prompt=True)
        if (end := self._end_of_turn(whole, messages, tools, num_known)) is None:
            return None
        ids = self.vocabulary.encode(whole[end:])
        if last_token in self.stop_token_ids:
            # Sampled already: the token that closes the turn, or (GLM) the one that opens the next.
            head = ids[: self._closing_length + 1]
            return ids[head.index(last_token) + 1 :] if last_token in head else ids
        return ids

    def _end_of_turn(
        self,
        whole: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        num_known: int,
    ) -> int | None:
        """Where in `whole` the closing of the last known message begins; None where `whole` rewrites what is known."""
        if (closing := self._closing) is None:
            return None
        try:
            known = self.render(messages[:num_known], tools, is_prompt=False)
            if known.endswith(closing) and whole.startswith(known):
                return len(known) - len(closing)
            # Qwen3 writes an empty think block into a turn only while it is the last: what the
            # assistant said is in the chain as sampled, so it is enough that everything before
            # stands, and that nothing it said is dropped.
            before = self.render(messages[: num_known - 1], tools, is_prompt=False)
        except TemplateError:
            return None
        end = whole.find(closing, len(before))
        if not self._closing_length or end < 0 or not whole.startswith(before):
            return None
        turn, said = whole[len(before) : end], messages[num_known - 1]
        is_whole = all(
            str(said.get(part) or "").strip() in turn for part in ("content", "reasoning_content")
        )
        return end if is_whole else None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, is_prompt: bool
    ) -> str:
        """The conversation as text. Raises TemplateError when the template refuses it."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=is_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses the conversation: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(f"the chat template fails on the conversation: {error!r}") from None

    def _find_closing(self) -> str | None:
        """What the template writes after an assistant's text; None where it cannot be told."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, closing = self.render(messages, [], is_prompt=False).rpartition(_PROBE)
        except TemplateError:
            return None
        return closing if found else None


def load_template(model_dir: Path) -> ChatTemplate:
    """Read tokenizer, chat template and stop tokens of a model directory.

    Raises:
        UserError: one of them is missing or malformed.
    """
    config = _read_json(model_dir / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception
        raise UserError(
            _MODEL_PATH,
            f"tokenizer.json of the model cannot be read: {error}",
            "a fast tokenizer is needed",
        ) from None
    vocabulary = Vocabulary(tokenizer)
    special = {
        name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(config.get(name)))
    }
    stops = _stop_token_ids(model_dir, vocabulary, special)
    try:
        return ChatTemplate(_template_source(model_dir, config), vocabulary, special, stops)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(_MODEL_PATH, f"the model's chat template is malformed: {error}") from None


def _template_source(model_dir: Path, config: Mapping[str, Any]) -> str:
    if (file := model_dir / "chat_template.jinja").exists():
        return file.read_text()
    source = config.get("chat_template") or _read_json(model_dir / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(source, list):  # several by name, as transformers 4 wrote them
        named = {item["name"]: item["template"] for item in source}
        source = named.get("tool_use") or named.get("default")
    if not isinstance(source, str) or not source:
        raise UserError(
            _MODEL_PATH,
            "the model has no chat template",
            "add chat_template.jinja to it or take an instruction-tuned model",
        )
    return source


def _stop_token_ids(
    model_dir: Path, vocabulary: Vocabulary, special: Mapping[str, str]
) -> list[int]:
    found: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = _read_json(model_dir / file).get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    eos = vocabulary.token_id(special["eos_token"]) if "eos_token" in special else None
    return found if eos is None else [*found, eos]


def _token_text(value: object) -> str | None:
    """A special token is a string, or an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise UserError(_MODEL_PATH, f"{file.name} of the model is malformed: {error}") from None


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for transformers' own masks; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers renders chat templates in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _globals() -> dict[str, Any]:
    """What templates may call, beside what Jinja gives them."""
    return {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
