import json
import os
import subprocess
import sys

import pytest

from rljob import weights
from rljob.ids import PolicyVersion
from rljob.weights import Canary, RawTensor, WeightStore
from rljob_rollout_worker import vllm_plugin as plugin

NEW, OLD = [-1.0, -2.0, -3.0], [-1.5, -2.5, -2.0]
HALF = [(new + old) / 2 for new, old in zip(NEW, OLD, strict=True)]
NAN = [float("nan")] * 3


def nearly(scores, by=1e-5):
    return [score + by for score in scores]


@pytest.mark.parametrize(
    ("expected", "before", "after", "strict", "verdict"),
    [
        (NEW, OLD, nearly(NEW), True, "new"),
        (NEW, OLD, OLD, True, "old"),
        (NEW, OLD, HALF, True, "old"),  # a tied head that was left behind
        (NEW, nearly(NEW), nearly(NEW), True, "indistinguishable"),
        (NEW, OLD, NAN, True, "old"),
        (NEW, NAN, nearly(NEW), True, "new"),
        (NEW, nearly(NEW), OLD, True, "old"),  # broken, though the step was tiny
        (NEW, OLD, nearly(NEW, 0.05), False, "new"),  # low precision: most of the way is enough
        (NEW, OLD, OLD, False, "old"),
        (NEW, nearly(NEW, 0.02), nearly(NEW, 0.025), False, "indistinguishable"),
    ],
)
def test_the_canary_is_judged_by_where_the_score_went(expected, before, after, strict, verdict):
    noise = 1e-3 if strict else plugin.LOW_PRECISION_NOISE
    assert plugin.judge(expected, before, after, noise, strict=strict) == verdict


@pytest.fixture
def published(artifacts, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    store = WeightStore(artifacts)
    tensors = [RawTensor("a", "F32", [2], b"12345678"), RawTensor("b", "BF16", [1, 1], b"ab")]
    canary = Canary(prompt_ids=[1], token_ids=[2], logprobs=[-0.1])
    digest = store.publish(PolicyVersion(1, 2), source, canary, tensors=tensors)
    return store.path(PolicyVersion(1, 2)), digest


def test_the_stand_alone_file_reads_what_the_store_writes(published):
    path, digest = published
    manifest = plugin.read_manifest(path, (1, 2), digest)
    tensors = {
        name: (dtype, shape, bytes(data))
        for name, dtype, shape, data in plugin.read_tensors(path, manifest["tensors"])
    }
    assert tensors == {"a": ("F32", [2], b"12345678"), "b": ("BF16", [1, 1], b"ab")}
    assert plugin.MANIFEST == weights.MANIFEST


@pytest.mark.parametrize("field", ["incarnation", "n", "tensors", "canary", "digest"])
def test_a_manifest_that_was_touched_is_refused(published, field):
    path, digest = published
    manifest = json.loads((path / plugin.MANIFEST).read_text())
    manifest[field] = "0" * 64
    (path / plugin.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(plugin.RefusedError):
        plugin.read_manifest(path, (1, 2), digest)


def test_missing_unnamed_and_torn_tensors_are_told_apart(published):
    path, _ = published
    hashes = plugin.read_manifest(path, (1, 2), "")["tensors"]
    with pytest.raises(ValueError, match="1 tensors are missing, c first"):
        list(plugin.read_tensors(path, hashes | {"c": "0"}))
    with pytest.raises(ValueError, match="b is not the tensor"):
        list(plugin.read_tensors(path, {"a": hashes["a"]}))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="b is torn"):
        list(plugin.read_tensors(path, hashes))


def test_every_process_below_is_found():
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE)
    below = []
    try:
        while not (below := plugin.descendants(child.pid)):
            assert child.poll() is None
        assert {child.pid, *below} <= set(plugin.descendants(os.getpid()))
    finally:
        # the test run has other children (its store): they are not this test's to end
        for pid in [*below, child.pid]:
            os.kill(pid, 9)
        child.wait()
        child.stdin.close()


def test_only_requests_without_any_progress_count_as_a_stall():
    watch = plugin.StallWatch()
    seen = [
        (0, None),
        (10, (0, 0)),
        (20, (0, 0)),
        (25, (0, 7)),
        (40, (0, 7)),
        (41, (1, 0)),
        (50, None),
    ]
    assert [watch.seconds(now, progress) for now, progress in seen] == [0, 0, 10, 0, 15, 0, 0]
    assert watch.seconds(60, (1, 0)) == 0, "an idle engine must not be blamed for its idle time"


def test_the_plugin_stands_alone():
    heavy = "[m for m in sys.modules if m.split('.')[0] in {'rljob', 'torch', 'vllm', 'starlette'}]"
    code = f"import sys, rljob_rollout_worker.vllm_plugin; print({heavy})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "[]"


def test_the_root_cause_of_a_forked_process_is_known_to_its_parent():
    code = """if True:
        import logging, os
        from rljob_rollout_worker.vllm_cpu import RootCause
        cause = RootCause()
        cause.install()
        log = logging.getLogger("x")
        print("before:", cause.read())
        if os.fork() == 0:
            try:
                raise ValueError("no such model")
            except ValueError:
                log.exception("engine core failed")
                os._exit(1)
        os.wait()
        print("after:", cause.read())
    """
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.splitlines() == ["before: ", "after: ValueError('no such model')"]


def test_the_record_factory_that_was_there_is_kept_and_wrapping_has_an_end():
    code = """if True:
        import logging
        from rljob_rollout_worker.vllm_cpu import RootCause
        cause = RootCause()
        def vllms(make):
            def factory(*args, **kwargs):
                record = make(*args, **kwargs)
                record.vllm_process_name = "core"
                return record
            return factory
        logging.setLogRecordFactory(vllms(logging.getLogRecordFactory()))
        cause.install()
        logging.setLogRecordFactory(vllms(logging.getLogRecordFactory()))
        cause.install()
        print(logging.makeLogRecord({}) and logging.getLogRecordFactory()(
            "x", 20, "f", 1, "m", (), None).vllm_process_name)
    """
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "core"
