from rljob.kube import resources
from rljob.testing.kube import FakeKube
from rljob_operator.copies import CHILD_KINDS, OPTIONAL_KINDS
from rljob_operator.preflight import RULES, missing


async def test_a_role_that_has_everything_lacks_nothing():
    assert await missing(FakeKube().client(), [], "system", []) == []


async def test_each_missing_verb_is_a_line_with_verb_resource_and_namespace():
    fake = FakeKube()
    fake.denied = {("create", "jobs"), ("update", "leases")}
    lines = [str(line) for line in await missing(fake.client(), ["a", "b"], "system", [])]
    assert [line.partition("; ")[0] for line in lines] == [
        "rbac: the operator may not create jobs.batch in namespace a",
        "rbac: the operator may not create jobs.batch in namespace b",
        "rbac: the operator may not update leases.coordination.k8s.io in namespace system",
    ]
    (line,) = [
        str(line) for line in await missing(fake.client(), [], "system", []) if "jobs" in str(line)
    ]
    assert "in all namespaces" in line


async def test_optional_kinds_are_asked_for_only_where_the_cluster_knows_them():
    fake = FakeKube()
    fake.denied = {("watch", "podmonitors")}
    assert not await missing(fake.client(), [], "system", [])
    assert len(await missing(fake.client(), [], "system", [resources.POD_MONITOR])) == 1


def test_everything_that_is_watched_is_in_the_rules():
    rules = {rule.resource: rule for rule in RULES if not rule.subresource}
    for kind in (resources.RLJOB, resources.POD, *CHILD_KINDS, *OPTIONAL_KINDS):
        assert {"list", "watch"} <= set(rules[kind].verbs)


def test_secrets_are_never_listed_and_volumes_never_deleted():
    rules = {rule.resource: rule.verbs for rule in RULES}
    assert not {"list", "watch", "delete"} & set(rules[resources.SECRET])
    assert "delete" not in rules[resources.PVC]
    assert all("*" not in rule.verbs for rule in RULES)
