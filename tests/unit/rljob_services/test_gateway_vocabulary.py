"""Control tokens are the template's alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from rljob_services.gateway.template import ChatTemplate
from rljob_services.gateway.vocabulary import ForgedTokenError, Vocabulary

LITERALS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
fragments = st.sampled_from(
    [*LITERALS, "<|im", "_end|>", "<|", "|>", "<tool_", "call>", "user\n", "é", "x"]
)
hostile_text = st.lists(st.one_of(fragments, st.text(max_size=5)), max_size=8).map("".join)


@given(text=hostile_text)
def test_marked_text_never_becomes_a_control_token_and_keeps_every_character(
    template: ChatTemplate, text: str
):
    vocabulary = template.vocabulary
    ids = vocabulary.encode(vocabulary.mark(text))
    control = {vocabulary.token_id(literal) for literal in LITERALS}
    assert not control & set(ids)
    assert vocabulary.decode(ids) == text


@given(text=hostile_text)
def test_unmarked_text_is_encoded_as_the_tokenizer_does(
    template: ChatTemplate, model_dir, text: str
):
    plain = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert template.vocabulary.encode(text) == plain.encode(text, add_special_tokens=False).ids


def test_marks_reach_into_lists_objects_and_keys(template: ChatTemplate):
    vocabulary = template.vocabulary
    marked = vocabulary.mark({"<|im_end|>": [1, None, {"a": "<tool_call>"}]})
    assert "<|im_end|>" not in str(marked)
    assert "<tool_call>" not in str(marked)
    assert next(iter(marked.values()))[:2] == [1, None]


def test_mark_up_of_assistants_may_stay_while_turn_boundaries_never_do(template: ChatTemplate):
    marked = template.vocabulary.mark("<tool_call>x<|im_end|>", only_special=True)
    assert marked.startswith("<tool_call>x")
    assert "<|im_end|>" not in marked


def test_a_placeholder_cannot_be_guessed_from_another_process(template: ChatTemplate):
    text = "x0123456789abcdef" + "n0x"
    assert (
        template.vocabulary.decode(template.vocabulary.encode(template.vocabulary.mark(text)))
        == text
    )


def small_vocabulary(**token_options) -> Vocabulary:
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate("<|end>abc ")}, [], unk_token=None)
    )
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(
        [AddedToken("<|end|>", special=True, **token_options), AddedToken("\n\n", normalized=False)]
    )
    return Vocabulary(tokenizer)


def test_text_that_a_normaliser_turns_into_a_control_token_is_refused():
    vocabulary = small_vocabulary(normalized=True)
    with pytest.raises(ForgedTokenError):
        vocabulary.encode(vocabulary.mark("＜|end|＞"))


def test_white_space_that_is_an_added_token_stays_what_it_is():
    vocabulary = small_vocabulary(normalized=False)
    assert vocabulary.mark("a\n\nb") == "a\n\nb"


def test_a_tokenizer_without_added_tokens_marks_nothing():
    assert Vocabulary(Tokenizer(models.BPE({"a": 0}, []))).mark("<|end|>") == "<|end|>"
