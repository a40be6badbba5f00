"""`rljob plan`: the sandboxes of a manifest, alone and beside the nodes of a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob.errors import MachineError, UserError
from rljob.kube.config import KubeConfig
from rljob.testing.kube import FakeKube
from rljob_operator import commands
from rljob_operator.policies.sandbox_needs import RowCount, needs
from rljob_operator.show import cluster, plan_rows, plan_text
from rljob_operator.show.plan_nodes import Nodes, compare, look, own_pods
from rljob_operator.show.plan_rows import Rows, Split
from rljob_operator.show.plan_sandboxes import sandbox_json, sandbox_lines
from tests.unit.rljob_operator.conftest import make_job, manifest

POOL = {"name": "shells", "warm": 2, "max": 16, "images": [{"image": "a"}, {"image": "b"}]}
COUNTS = [RowCount("shell", "a", 9), RowCount("shell", "b", 3), RowCount("shell", "c", 1)]
ROWS = Rows({"train": Split(COUNTS)})


def job(**pool: Any) -> RLJob:
    return make_job(sandboxPools=[{**POOL, **pool}])


# ── alone ──


def test_text_and_json_tell_the_same_of_a_pool() -> None:
    found = needs(job(), COUNTS)
    text = "\n".join(sandbox_lines(ROWS, found, None))
    told = sandbox_json(ROWS, found, None)
    (pool,) = told["pools"]
    assert "13 rows of train" in text
    assert "64 claimed at once; warm 2, max 16" in text
    assert "in all                 16 pods, as many addresses; 0.8 cpu, 2048 MiB memory" in text
    assert (pool["atOnce"], told["needs"]["pods"], told["needs"]["addresses"]) == (64, 16, 16)
    assert [(each["image"], each["rows"], each["atMost"]) for each in pool["images"]] == [
        ("a", 9, 11),
        ("b", 3, 4),
        ("c", 1, 1),
    ]
    assert len(told["doesNotFit"]) == text.count("does not fit") == 2


def test_what_is_proposed_can_be_written_into_the_manifest() -> None:
    lines = sandbox_lines(ROWS, needs(job(), COUNTS), None)
    text = "\n".join(lines)
    begin = text.index("sandboxPools:")
    end = text.index("does not fit")
    proposed = yaml.safe_load(text[begin:end])["sandboxPools"]
    assert proposed == [
        {
            "name": "shells",
            "warm": 4,
            "max": 68,
            "images": [
                {"image": "a", "weight": 9},
                {"image": "b", "weight": 3},
                {"image": "c", "weight": 1},
            ],
        }
    ]
    assert needs(make_job(sandboxPools=proposed), COUNTS).problems == ()


def test_a_long_list_of_images_is_cut_in_the_text_alone() -> None:
    counts = [RowCount("shell", f"i{number:02}", 1) for number in range(20)]
    found, rows = needs(job(), counts), Rows({"train": Split(counts)})
    text = "\n".join(sandbox_lines(rows, found, None))
    assert "10 more (-o json)" in text
    assert len(sandbox_json(rows, found, None)["pools"][0]["images"]) == 22


def test_rows_that_are_elsewhere_are_named_and_nothing_is_made_up_of_them() -> None:
    rows = Rows({"train": Split(unread="pvc://data/x is a volume of the cluster")})
    text = "\n".join(sandbox_lines(rows, needs(job(), rows.counts), None))
    assert "train: pvc://data/x is a volume of the cluster; rows unread" in text
    assert "proposed" not in text


# ── the command ──


def written(folder: Path, rows: list[dict[str, Any]], **spec: Any) -> Path:
    file = folder / "rljob.yaml"
    data = {"train": {"source": "file://train.jsonl"}}
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file.write_text(yaml.safe_dump(manifest(data=data, **spec)))
    return file


def test_the_rows_of_a_file_are_counted_by_task_and_image(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x"},
        {"prompt": "y", "overrides": {"image": "b"}},
        {"prompt": "z", "overrides": {"image": "b", "maxTurns": 2}},
    ]
    file = written(tmp_path, rows, sandboxPools=[{**POOL, "runtime": "simulated", "max": 80}])
    made = plan_text.make(file, [], in_cluster=False, namespace=None)
    (pool,) = json.loads(plan_text.as_json(made))["sandboxes"]["pools"]
    assert [(each["image"], each["rows"]) for each in pool["images"]] == [("a", 1), ("b", 2)]
    text = plan_text.describe(made)
    assert "weight bytes" in text
    assert "3 rows of train" in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"task": "nope", "prompt": "x"}, r"train\.jsonl:1: task 'nope' is not configured"),
        ({"prompt": "x", "overrides": {"image": 3}}, r"row 1: overrides\.image is 3; name an image"),
        ({"text": "x"}, r"train\.jsonl:1: unknown key 'text'"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_one_line_that_names_it(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as refused:
        plan_text.make(written(tmp_path, [row]), [], in_cluster=False, namespace=None)
    assert len(str(refused.value).splitlines()) == 1


def test_without_the_trainers_package_the_rest_of_the_plan_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_rows, "_MODULE", "rljob_trainer.is_not_there")
    made = plan_text.make(
        written(tmp_path, [{"prompt": "x"}]), [], in_cluster=False, namespace=None
    )
    assert made.rows.counts is None
    assert "No module named" in plan_text.describe(made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "plan: needs one manifest; rljob plan -f rljob.yaml"),
        ({"manifest": Path("a"), "filename": Path("b")}, "plan: needs one manifest"),
        ({"filename": Path("a"), "output": "yaml"}, "-o: 'yaml' is no form; use text or json"),
        ({"filename": Path("no.yaml"), "as_json": True}, "no.yaml: there is no such file"),
    ],
)
def test_options_that_make_no_sense_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        commands.plan(**options)
    assert str(refused.value).startswith(said)


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands.plan(filename=written(tmp_path, [{"prompt": "x"}]), output="json")
    told = json.loads(capsys.readouterr().out)
    assert told["job"] == "test"
    assert told["sandboxes"]["rows"] == {"train": {"rows": 1}}
    assert told["episodesPerStep"] == 8


# ── beside a cluster ──


def node(name: str, memory: str = "3Gi", **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "4", "memory": memory, "ephemeral-storage": "50Gi", "pods": "110"}
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
    status = {"allocatable": allocatable}
    return {"kind": "Node", "metadata": metadata, "spec": spec, "status": status}


def pod(name: str, on: str, memory: str, **marks: str) -> dict[str, Any]:
    container = {"name": "c", "resources": {"requests": {"memory": memory}}}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "labels": marks},
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": "Running"},
    }


async def compared(fake: FakeKube, made: RLJob) -> Nodes:
    client = fake.client()
    try:
        return await compare(client, made, needs(made, COUNTS), "ns")
    finally:
        await client.aclose()


def of_sandboxes(found: Nodes) -> int:
    return found.placed["shells"]


def test_the_jobs_own_pods_are_those_that_the_operator_renders() -> None:
    found = {wish.pool: wish for wish in own_pods(job())}
    assert found.keys() == {"(store)", "(rollout)", "(trainer)"}
    assert all(wish.each.memory_mib > 0 and wish.number == 1 for wish in found.values())


async def test_sandboxes_get_what_runs_and_the_job_itself_leave() -> None:
    fake = FakeKube()
    fake.put(node("n1", "4Gi"))
    fake.put(pod("other", "n1", "1Gi"))
    found = await compared(fake, job(max=60))
    own = sum(wish.each.memory_mib * wish.number for wish in own_pods(job()))
    assert found.rooms[0].free.memory_mib == 3072
    assert of_sandboxes(found) == (3072 - own) // 128
    missing = 60 - of_sandboxes(found)
    assert found.problems == [
        f"shells: {missing} of 60 pods find no node (memory); add nodes, or ask for less"
    ]


async def test_pods_of_the_same_job_are_not_counted_twice() -> None:
    fake = FakeKube()
    fake.put(node("n1", "4Gi"))
    fake.put(pod("mine", "n1", "3Gi", **{labels.JOB: "test"}))
    found = await compared(fake, job())
    assert found.rooms[0].free.memory_mib == 4096


async def test_labels_taints_and_the_runtime_class_choose_the_nodes() -> None:
    fake = FakeKube()
    fake.put(node("n1", "64Gi"))
    taint = {"key": "boxes", "value": "", "effect": "NoSchedule"}
    fake.put(node("n2", "64Gi", taints=[taint]))
    overhead = {"podFixed": {"memory": "72Mi"}}
    scheduling = {"nodeSelector": {"kubernetes.io/hostname": "n2"}}
    runtime = {"metadata": {"name": "gvisor"}, "overhead": overhead, "scheduling": scheduling}
    fake.put({"kind": "RuntimeClass", "handler": "runsc", **runtime})
    plain = await compared(fake, job(runtimeClassName="gvisor"))
    assert of_sandboxes(plain) == 0
    assert "(has no label kubernetes.io/hostname=n2, taint boxes)" in plain.problems[0]
    tolerant = {"tolerations": [{"key": "boxes", "operator": "Exists"}]}
    better = await compared(fake, job(runtimeClassName="gvisor", pod=tolerant))
    assert of_sandboxes(better) == 16
    assert [(fit.node, fit.number) for fit in better.fits] == [
        ("n1", 0),
        ("n2", min(65536 // 200, 80)),
    ]


async def test_a_pool_that_pulls_ahead_has_a_pod_on_each_node_that_may_run_it() -> None:
    fake = FakeKube()
    fake.put(node("n1", podCIDR="10.0.0.0/24"))
    fake.put(node("n2", podCIDR="10.0.1.0/24", unschedulable=True))
    found = await compared(fake, job(prePull=True))
    assert [(room.pods, room.addresses) for room in found.rooms] == [(109, 252), (110, 253)]


async def test_a_runtime_class_that_is_not_there_and_a_quota_are_named() -> None:
    fake = FakeKube()
    fake.put(node("n1", "64Gi"))
    quota = {"hard": {"pods": "10"}, "used": {"pods": "2"}}
    fake.put(
        {
            "kind": "ResourceQuota",
            "metadata": {"name": "q", "namespace": "ns"},
            "status": quota,
        }
    )
    found = await compared(fake, job(runtimeClassName="gvisor"))
    assert found.problems[0].startswith("RuntimeClass gvisor: is not in the cluster")
    assert found.problems[1].startswith("ResourceQuota q: pods 10 is 11 too small")


async def test_without_the_right_to_see_quotas_and_runtime_classes_the_plan_says_less() -> None:
    fake = FakeKube()
    fake.put(node("n1", "64Gi"))
    fake.denied = {("list", "resourcequotas"), ("get", "runtimeclasses")}
    assert (await compared(fake, job(runtimeClassName="gvisor"))).problems == []


async def test_the_text_shows_the_nodes() -> None:
    fake = FakeKube()
    fake.put(node("n1", "64Gi", podCIDR="10.0.0.0/24"))
    found = needs(job(), COUNTS)
    text = "\n".join(sandbox_lines(ROWS, found, await compared(fake, job())))
    assert "nodes                  what is left beside what runs" in text
    line = next(line for line in text.splitlines() if line.split()[:1] == ["n1"])
    assert line.split() == ["n1", "4", "64.0", "GiB", "50.0", "GiB", "110", "253", "80", "cpu"]


def test_without_the_right_to_see_nodes_the_way_out_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeKube()
    fake.denied = {("list", "nodes")}
    config = KubeConfig("http://fake")
    monkeypatch.setattr(cluster, "load_config", lambda: config)
    monkeypatch.setattr(cluster, "KubeClient", lambda *_, **options: fake.client())
    with pytest.raises(MachineError, match=r"cannot list resource \"nodes\".*without --cluster"):
        look(job(), needs(job(), COUNTS), "ns")
