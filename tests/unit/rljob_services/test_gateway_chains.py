"""Chains: what continues what, and the record."""

from hypothesis import given
from hypothesis import strategies as st

from rljob.ids import PolicyVersion
from rljob_services.gateway.chains import OpenChain, Prompt, Sampled, find_chain
from rljob_services.gateway.messages import message_key, read_message


def prompt(*texts: str, tools_key: bytes = b"[]") -> Prompt:
    messages = [read_message(i, {"role": "user", "content": text}) for i, text in enumerate(texts)]
    return Prompt(
        messages=messages, keys=[message_key(m) for m in messages], tools=[], tools_key=tools_key
    )


def chain_of(*texts: str, tools_key: bytes = b"[]") -> OpenChain:
    chain = OpenChain([], tools_key, "main")
    chain.keys = prompt(*texts).keys
    return chain


def test_the_longest_chain_that_a_request_continues_is_taken():
    short, long, other = chain_of("a"), chain_of("a", "b"), chain_of("x", "b")
    assert find_chain([short, long, other], prompt("a", "b", "c")) is long
    assert find_chain([short, long, other], prompt("a", "B", "c")) is short


def test_the_newest_of_equal_chains_is_taken():
    old, new = chain_of("a"), chain_of("a")
    assert find_chain([old, new], prompt("a", "b")) is new


def test_a_request_that_adds_nothing_or_edits_history_or_has_other_tools_continues_nothing():
    chain = chain_of("a", "b")
    assert find_chain([chain], prompt("a", "b")) is None
    assert find_chain([chain], prompt("a")) is None
    assert find_chain([chain], prompt("A", "b", "c")) is None
    assert find_chain([chain], prompt("a", "b", "c", tools_key=b"[{}]")) is None


def test_a_busy_chain_is_continued_by_nobody_else():
    chain = chain_of("a")
    chain.is_busy = True
    assert find_chain([chain], prompt("a", "b")) is None


pieces = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4)


@given(turns=st.lists(st.tuples(st.integers(0, 5), pieces), min_size=1, max_size=6))
def test_spans_cover_exactly_the_sampled_tokens(turns):
    chain = OpenChain([], b"", "helper")
    expected = []
    for num_context, parts in turns:
        versions = [(length, PolicyVersion(1, n)) for length, n in parts]
        count = sum(length for length, _ in versions)
        chain.append(
            [9] * num_context,
            Sampled(
                token_ids=[7] * count,
                logprobs=[-0.25] * count,
                versions=versions,
                finish_reason="stop",
            ),
        )
        expected += [None] * num_context + [
            version for length, version in versions for _ in range(length)
        ]
    record = chain.record()
    by_token = [None] * len(record.tokens)
    for span in record.version_spans:
        assert span.length > 0
        for position in range(span.start, span.start + span.length):
            assert by_token[position] is None
            by_token[position] = (span.incarnation, span.n)
    assert by_token == expected
    assert record.action_mask == [version is not None for version in expected]
    assert len(record.logprobs) == sum(record.action_mask)
    assert len(record.tokens) == len(record.action_mask)
    first = record.action_mask.index(True) if any(record.action_mask) else len(record.tokens)
    assert record.prompt_length == first
    neighbours = zip(record.version_spans, record.version_spans[1:], strict=False)
    assert all(
        a.start + a.length < b.start or (a.incarnation, a.n) != (b.incarnation, b.n)
        for a, b in neighbours
    )
    assert record.agent_id == "helper"
