"""Rules across fields: a key without effect, a name that points nowhere, numbers that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rljob.api.effects import resolved, store_need_mib
from rljob.api.load import check, load
from rljob.api.placement import cluster_only_keys, refused_in_cluster
from rljob.api.source import parse
from rljob.errors import ManifestError

QUICKSTART = Path(__file__).parents[4] / "examples/quickstart/rljob.yaml"

REFUSED = [
    (["model.revision=main"], "spec.model.revision", "has no effect"),
    (["rollout.schedule=sync"], "spec.rollout.maxStaleness", "has no effect with schedule sync"),
    (["rollout.schedule=one_step", "rollout.maxStaleness=null", "rollout.onStale=evict"],
     "spec.rollout.onStale", "has no effect"),
    (["rollout.schedule=sync", "rollout.maxStaleness=null", "rollout.partialRollout=false"],
     "spec.rollout.partialRollout", "no effect"),
    (["rollout.onStale=wait", "rollout.maxEvictions=2"], "spec.rollout.maxEvictions", "only with"),
    (["rollout.waitSeconds=5"], "spec.rollout.waitSeconds", "only with onStale wait"),
    (["rollout.sampling.topP=0.9"], "spec.rollout.sampling.topP", "another policy"),
    (["rollout.sampling.maxTokensPerTurn=1024"], "spec.rollout.sampling.maxTokensPerTurn", "leaves no room"),
    (["data.validation.sampling.maxTokensPerTurn=2000"],
     "spec.data.validation.sampling.maxTokensPerTurn", "leaves no room"),
    (["trainer.algorithm.advantage=rloo", "trainer.algorithm.normalizeByStd=true"],
     "spec.trainer.algorithm.normalizeByStd", "no effect"),
    (["trainer.algorithm.correction.type=token_is"],
     "spec.trainer.algorithm.correction", "only with oldLogprobs recompute"),
    (["rollout.groupSize=1"], "spec.rollout.groupSize", "nothing to compare"),
    (["tasks[0].sandbox.pool=other"], "spec.tasks[0].sandbox.pool", "there is no pool other"),
    (["tasks[0].agent.tools=[{name: bash}, {name: bash}]"], "spec.tasks[0].agent.tools[1].name", "used twice"),
    (["sandboxPools=[{name: shells}, {name: shells}]"], "spec.sandboxPools[1].name", "used twice"),
    (["sandboxPools=[{name: shells}, {name: idle}]"], "spec.sandboxPools[1].name", "no task uses the pool idle"),
    (["sandboxPools[0].recycle={strategy: recreate, maxReuses: 3}"],
     "spec.sandboxPools[0].recycle.maxReuses", "no effect"),
    (["sandboxPools[0].warm=50"], "spec.sandboxPools[0]", "warm 50 is above max 40"),
    (["store.redis.maxMemoryMib=16", "model.maxContextLength=32768", "rollout.sampling.maxTokensPerTurn=56"],
     "spec.store.redis.maxMemoryMib", "too small"),
    (["store.redis={url: 'redis://h/0', port: 7000}"], "spec.store.redis.port", "no effect beside url"),
    (["store.redis={url: 'redis://h/0', maxMemoryMib: 64}"],
     "spec.store.redis.maxMemoryMib", "no effect beside url"),
    (["trainer.optimizer.warmupSteps=99"], "spec.trainer.optimizer.warmupSteps", "more than steps"),
    (["trainer.weights.publishEverySteps=4"], "spec.trainer.weights.publishEverySteps", "too rare"),
    (["lifecycle={activeDeadlineSeconds: 10, progressDeadlineSeconds: 20}"],
     "spec.lifecycle.progressDeadlineSeconds", "no effect"),
    (["rollout.engine.args=[--port=3]"], "spec.rollout.engine.args[0]", "--port is set by rljob itself"),
    (["rollout.engine.args=[--max_model_len, '3']"],
     "spec.rollout.engine.args[0]", "--max-model-len is set by rljob itself"),
    (["rollout.engine={kind: simulated, args: [--dtype=float32]}"], "spec.rollout.engine.args", "no effect"),
    (["rollout.engine.port=7000", "store.redis.port=7000"], "spec.rollout.engine.port", "of spec.store.redis too"),
    (["tasks[0].reward.options={a: 1}"], "spec.tasks[0].reward.options", "only beside a reward's name"),
    (["data.validation.passAt=[4]"], "spec.data.validation", "passAt 4 needs samplesPerPrompt"),
    (["rollout.maxConcurrentEpisodes=4"], "spec.rollout.maxConcurrentEpisodes", "below groupSize"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("assignments", "path", "said"), REFUSED, ids=[case[1] for case in REFUSED]
)
def test_what_makes_no_sense_is_refused_at_its_path(
    assignments: list[str], path: str, said: str
) -> None:
    with pytest.raises(ManifestError) as error:
        load(QUICKSTART, assignments, plugins=False)
    found = [line for line in str(error.value).splitlines() if f": {path}: " in line]
    assert found, str(error.value)
    assert said in found[0]


ALLOWED = [
    ["rollout.schedule=sync", "rollout.maxStaleness=null"],
    ["rollout.schedule=one_step", "rollout.maxStaleness=null"],
    ["rollout.onStale=wait", "rollout.waitSeconds=5"],
    ["rollout.onStale=evict", "rollout.maxEvictions=5"],
    ["model.source=hf://a/b", "model.revision=main"],
    ["trainer.algorithm.oldLogprobs=recompute", "trainer.algorithm.correction.type=sequence_is"],
    [
        "data.validation.samplesPerPrompt=4",
        "data.validation.passAt=[1, 4]",
        "data.validation.sampling={topP: 0.9}",
    ],
    ["rollout.engine.args=[--tensor-parallel-size=4]"],
    ["store.redis.url=redis://h/0"],
    ["lifecycle.activeDeadlineSeconds=60"],
]


@pytest.mark.parametrize("assignments", ALLOWED, ids=lambda case: case[0])
def test_what_makes_sense_is_allowed(assignments: list[str]) -> None:
    job = load(QUICKSTART, assignments, plugins=False)
    again = check(parse(yaml.safe_dump(resolved(job)), "resolved"))
    assert resolved(again) == resolved(job)


def test_cluster_only_keys_are_named_and_only_those_that_are_given() -> None:
    assert cluster_only_keys(load(QUICKSTART, plugins=False)) == []
    given = [
        "rollout.engine.image=vllm:1",
        "sandboxPools[0].runtimeClassName=gvisor",
        "trainer.resources.limits={}",
    ]
    job = load(QUICKSTART, given, plugins=False)
    assert cluster_only_keys(job) == [
        "spec.rollout.engine.image",
        "spec.trainer.resources",
        "spec.sandboxPools[].runtimeClassName",
    ]


def test_the_stores_need_grows_with_what_may_be_outstanding() -> None:
    small = store_need_mib(load(QUICKSTART, plugins=False))
    large = store_need_mib(
        load(QUICKSTART, ["rollout.maxStaleness=20", "rollout.maxEvictions=null"], plugins=False)
    )
    assert 8 < small < large


@pytest.mark.parametrize(
    "key", ["model.source", "data.train.source", "data.validation.source", "store.artifacts"]
)
def test_one_machine_refuses_a_volume_of_a_cluster_at_its_path(key: str) -> None:
    load(QUICKSTART, [f"{key}=pvc://claim/x"], plugins=False)
    with pytest.raises(ManifestError) as error:
        load(QUICKSTART, [f"{key}=pvc://claim/x"], plugins=False, local=True)
    (line,) = str(error.value).splitlines()
    assert f"spec.{key}: pvc://claim/x is a volume of a cluster; use file://" in line


def test_a_cluster_refuses_what_only_one_machine_has() -> None:
    given = ["store.artifacts=file:///tmp/a", "store.redis.url=unix:///run/redis.sock"]
    found = refused_in_cluster(load(QUICKSTART, given, plugins=False))
    assert [str(problem).partition(":")[0] for problem in found] == [
        "spec.store.artifacts",
        "spec.store.redis.url",
    ]
    assert refused_in_cluster(load(QUICKSTART, plugins=False)) == []


@pytest.mark.parametrize(
    ("assignments", "gone"),
    [
        (["mode=eval", "data.train=null", "trainer=null", "rollout.maxStaleness=null",
          "rollout.groupSize=null", "rollout.schedule=null", "data.validation.everySteps=null"],
         ["trainer", "data.train", "rollout.schedule", "rollout.groupSize", "data.validation.everySteps"]),
        (["mode=rollout", "data.validation=null", "trainer=null", "rollout.maxStaleness=null",
          "rollout.schedule=null"],
         ["trainer", "data.validation", "rollout.schedule"]),
    ],
)  # fmt: skip
def test_a_resolved_manifest_holds_only_what_has_an_effect_in_its_mode(
    assignments: list[str], gone: list[str]
) -> None:
    values = resolved(load(QUICKSTART, assignments, plugins=False))
    for path in gone:
        here = values["spec"]
        for key in path.split("."):
            here = here.get(key, {})
        assert here == {}, path
    again = check(parse(yaml.safe_dump(values), "resolved"))
    assert again.spec.trainer.steps == 1
    assert resolved(again) == values
