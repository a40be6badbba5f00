import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.errors import CorruptError
from rljob.ids import PolicyVersion
from rljob.weights import MANIFEST, Canary, RawTensor, VersionGoneError, WeightStore

V = PolicyVersion
CANARY = Canary(prompt_ids=[1, 2], token_ids=[3], logprobs=[-0.5])


@pytest.fixture
def store(artifacts):
    return WeightStore(artifacts)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors(value):
    return [
        RawTensor("a.weight", "F32", [2], struct.pack("<2f", value, 2 * value)),
        RawTensor("b.weight", "BF16", [3], b"\x01\x02\x03\x04\x05\x06"),
        RawTensor("empty", "F32", [0], b""),
    ]


def test_what_is_published_is_a_model_directory_that_verifies(store, source):
    digest = store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    manifest = store.verify(V(1, 0))
    assert manifest.digest == digest
    assert set(manifest.tensors) == {"a.weight", "b.weight", "empty"}
    assert set(manifest.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert manifest.canary == CANARY


def test_safetensors_written_without_torch_are_read_by_the_real_library(store, source):
    from safetensors.numpy import load_file

    store.publish(V(1, 0), source, None, tensors=[tensors(3.0)[0]])
    loaded = load_file(store.path(V(1, 0)) / "model.safetensors")
    assert loaded["a.weight"].tolist() == [3.0, 6.0]


def test_safetensors_of_the_source_are_published_with_the_hash_of_each_tensor(store, source):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.arange(4, dtype=np.float32)}, source / "model.safetensors", {"format": "pt"})
    by_file = store.publish(V(1, 0), source, None)
    raw = RawTensor("w", "F32", [4], np.arange(4, dtype=np.float32).tobytes())
    store.publish(V(1, 1), source, None, tensors=[raw])
    assert store.manifest(V(1, 0)).tensors == store.manifest(V(1, 1)).tensors
    assert by_file


def test_a_canary_may_be_given_as_a_mapping(store, source):
    canary = {"prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0], "previous_logprobs": None}
    store.publish(V(1, 0), source, canary, tensors=tensors(1.0))
    assert store.manifest(V(1, 0)).canary == Canary(prompt_ids=[1], token_ids=[2], logprobs=[-1.0])


def test_publishing_again_is_harmless_with_the_same_content_and_refused_with_other(store, source):
    digest = store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    assert store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0)) == digest
    with pytest.raises(CorruptError, match="other content"):
        store.publish(V(1, 0), source, CANARY, tensors=tensors(2.0))
    assert store.verify(V(1, 0)).digest == digest


def test_a_publisher_that_dies_half_way_leaves_no_version(store, source, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rljob.weights._write", die)
        patch.setattr(
            "rljob.weights.shutil.rmtree", lambda *_, **__: None
        )  # it is dead: nothing is cleaned up
        with pytest.raises(KeyboardInterrupt):
            store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    assert store.list() == []
    assert len(list(store.root.iterdir())) == 1
    store.publish(V(2, 0), source, CANARY, tensors=tensors(1.0))
    assert [path.name for path in store.root.iterdir()] == ["2-0"]


def test_fetch_gives_a_verified_copy_that_outlives_the_version(store, source, tmp_path):
    store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    path = store.fetch(V(1, 0), tmp_path / "dest")
    assert path == store.fetch(V(1, 0), tmp_path / "dest")
    assert store.prune(keep=0) == [V(1, 0)]
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        MANIFEST,
    }


def test_a_version_that_is_not_there_is_gone(store, tmp_path):
    for call in (
        store.manifest,
        store.verify,
        lambda version: store.fetch(version, tmp_path / "dest"),
    ):
        with pytest.raises(VersionGoneError, match="1-9"):
            call(V(1, 9))
    assert store.list() == []


def test_a_version_that_vanishes_while_it_is_fetched_is_gone_and_leaves_nothing(
    store, source, tmp_path, monkeypatch
):
    store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    (store.path(V(1, 0)) / "tokenizer.json").unlink()
    with pytest.raises(VersionGoneError):
        store.fetch(V(1, 0), tmp_path / "dest")
    assert list((tmp_path / "dest").iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", MANIFEST])
def test_one_flipped_bit_in_any_file_is_found(store, source, tmp_path, name):
    store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    file = store.path(V(1, 0)) / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        store.verify(V(1, 0))
    with pytest.raises(CorruptError):
        store.fetch(V(1, 0), tmp_path / "dest")


def test_a_manifest_under_another_name_is_not_believed(store, source):
    store.publish(V(1, 0), source, CANARY, tensors=tensors(1.0))
    store.path(V(1, 0)).rename(store.path(V(1, 5)))
    with pytest.raises(CorruptError):
        store.manifest(V(1, 5))


@settings(deadline=None, max_examples=25)
@given(
    versions=st.sets(st.tuples(st.integers(1, 3), st.integers(0, 12)), max_size=8),
    keep=st.integers(1, 4),
    data=st.data(),
)
def test_prune_keeps_the_newest_pairs_and_whatever_is_held(tmp_path_factory, versions, keep, data):
    store = WeightStore(tmp_path_factory.mktemp("store"))
    for version in versions:
        folder = store.path(V(*version))
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(json.dumps({}))
    held = (
        {V(*v) for v in data.draw(st.sets(st.sampled_from(sorted(versions)), max_size=2))}
        if versions
        else set()
    )
    store.prune(keep, held)
    newest = {V(*version) for version in sorted(versions)[-keep:]}
    assert set(store.list()) == newest | held
    assert len(list(store.root.glob("*"))) == len(newest | held)
