"""Which nodes' taints and labels let a pod be there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.kubernetes.objects import NodeFacts, PodConstraints


def node(labels: dict[str, str] | None = None, taints: list[dict[str, str]] | None = None) -> NodeFacts:
    return NodeFacts.of({"metadata": {"name": "n", "labels": labels}, "spec": {"taints": taints}})


def taint(key: str = "gpu", value: str = "", effect: str = "NoSchedule") -> dict[str, str]:
    return {"key": key, "effect": effect, **({"value": value} if value else {})}


def condition(operator: str, *values: str, key: str = "a") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("tolerations", "accepted"),
    [
        ([], False),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}], True),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"key": "gpu", "value": "yes"}], True),
        ([{"key": "gpu", "operator": "Equal", "value": "no"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
        ([{"operator": "Exists"}], True),
    ],
)
def test_tolerations(tolerations: list[dict[str, str]], accepted: bool) -> None:
    tainted = node(taints=[taint(value="yes")])
    assert PodConstraints.of({}, [], tolerations).accept(tainted) is accepted


def test_each_taint_must_be_tolerated() -> None:
    pod = PodConstraints.of({}, [], [{"key": "gpu", "operator": "Exists"}])
    assert not pod.accept(node(taints=[taint(), taint("team", "x", "NoExecute")]))


@pytest.mark.parametrize(
    "passing",
    [
        taint(effect="PreferNoSchedule"),
        taint("node.kubernetes.io/not-ready", effect="NoExecute"),
        taint("node.kubernetes.io/unschedulable"),
        taint("ToBeDeletedByClusterAutoscaler", "1700000000"),
        taint("karpenter.sh/disrupted"),
        taint("node.cilium.io/agent-not-ready"),
        taint("ebs.csi.aws.com/agent-not-ready", effect="NoExecute"),
    ],
)
def test_a_taint_that_goes_by_itself_rules_no_node_out(passing: dict[str, str]) -> None:
    assert PodConstraints.of({}, [], []).accept(node(taints=[passing]))


@pytest.mark.parametrize(
    ("term", "accepted"),
    [
        (condition("In", "4", "5"), True),
        (condition("In", "5"), False),
        (condition("NotIn", "5"), True),
        (condition("NotIn", "5", key="missing"), True),
        (condition("Exists"), True),
        (condition("Exists", key="missing"), False),
        (condition("DoesNotExist", key="missing"), True),
        (condition("Gt", "3"), True),
        (condition("Gt", "4"), False),
        (condition("Lt", "5"), True),
        (condition("Lt", "5", key="missing"), False),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}, True),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}, False),
        ({}, False),
    ],
)
def test_required_node_affinity(term: dict[str, Any], accepted: bool) -> None:
    assert PodConstraints.of({}, [term], []).accept(node({"a": "4"})) is accepted


def test_terms_are_alternatives_and_the_selector_holds_besides() -> None:
    terms = [condition("In", "5"), condition("In", "4")]
    assert PodConstraints.of({"zone": "x"}, terms, []).accept(node({"a": "4", "zone": "x"}))
    assert not PodConstraints.of({"zone": "y"}, terms, []).accept(node({"a": "4", "zone": "x"}))


def test_equal_demands_are_one_key() -> None:
    first, second = (PodConstraints.of(labels, [], []) for labels in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}))
    assert first == second
    assert hash(first) == hash(second)


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "x", "y"]), st.lists(st.sampled_from(["gpu", "team"]), max_size=2, unique=True)),
        max_size=6,
    ),
    st.sampled_from([{}, {"a": "x"}]),
    st.lists(
        st.sampled_from(
            [
                condition("In", "x"),
                condition("DoesNotExist"),
                condition("Exists", key="hostname"),
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
            ]
        ),
        max_size=2,
    ),
    st.lists(st.sampled_from([{"key": "gpu", "operator": "Exists"}]), max_size=1),
)
def test_many_nodes_are_judged_like_each_alone(
    nodes: list[tuple[str, list[str]]], selector: dict[str, str], terms: list[Any], tolerations: list[Any]
) -> None:
    facts = [
        NodeFacts(f"n{number}", {"a": value} if value else {}, tuple((key, "", "NoSchedule") for key in taints))
        for number, (value, taints) in enumerate(nodes)
    ]
    pod = PodConstraints.of(selector, terms, tolerations)
    assert pod.rejected(facts) == {each.name for each in facts if not pod.accept(each)}
