"""A real byte-level BPE tokenizer and a ChatML template with Qwen-style tool calls, trained in a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rljob_trainer.recipes.quickstart import rows
from rljob_trainer.recipes.quickstart.demonstrations import call_text, demonstrate

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SPECIAL = [END_OF_TEXT, START, END]
MAX_LENGTH = 2048

CHAT_TEMPLATE = r"""
{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
{%- for t in tools or [] %}
{{- t.function.name + '(' + (t.function.parameters.properties | join(', ')) + ')\n' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '</tool_response><|im_end|>\n' }}
{%- elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for tc in m.tool_calls or [] %}{{ '<tool_call>\n{"name": "' + tc.function.name + '", "arguments": ' }}
{{- tc.function.arguments if tc.function.arguments is string else tc.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Every message renders the same wherever it stands, so the ids of a longer conversation start
with those of the shorter.
Tools are listed as name(arguments): their JSON schemas would cost 60 of 168 prompt tokens."""

# One digit, one run of letters, or one run of everything else: a word has the same ids wherever it
# stands, which is what
# lets so small a model copy it.
_SPLIT = r"[0-9]|[A-Za-z]+|[^A-Za-z0-9]+"


def train_tokenizer(vocab_size: int = 1024, num_demonstrations: int = 1000) -> Tokenizer:
    """Train on demonstrations and on every word of the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL + TOOL_MARKS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_corpus(num_demonstrations), trainer)
    return _as_plain_tokens(tokenizer, TOOL_MARKS)


def _corpus(num_demonstrations: int) -> list[str]:
    rng = random.Random(0)
    corpus: list[str] = []
    for _ in range(num_demonstrations):
        row = rows.make_row(rng, "train")
        corpus.append(str(row.prompt))
        for name, argument, output in demonstrate(rng, row):
            text = call_text(name, argument)
            for mark in TOOL_MARKS:
                text = text.replace(mark, "")
            corpus += [text, output or ""]
    words = rows.ADJECTIVES + rows.ANIMALS + rows.STONES + rows.TREES + rows.FILES
    whole = [
        "system user assistant bash command submit answer",
        rows.SYSTEM_PROMPT,
        " ".join(words),
    ]
    return corpus + whole * 300


def _as_plain_tokens(tokenizer: Tokenizer, marks: list[str]) -> Tokenizer:
    """As in Qwen's tokenizer, tool marks are single tokens but not special: decoding keeps them."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in marks
    return Tokenizer.from_str(json.dumps(data))


def save_tokenizer(tokenizer: Tokenizer, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) into `target`."""
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
