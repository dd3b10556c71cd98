"""Policies through the pages, against a controller that is a process of its own."""

import pytest

from control.service import controller, parent
from headrace.control.client import Client, Endpoint
from headrace.control.policy import parse_policy, policy_document, policy_yaml
from headrace.web.source import ControllerPolicies

controller, parent = controller, parent  # noqa: PLW0127 - fixtures

FS = "version: 1\nfile_systems: {fs: {paths: [/x], capacity: {bytes_per_s: 100M}}}\n"
CAPPED = FS + "jobs: {train: {cap: {bytes_per_s: 10M}}}\n"


@pytest.fixture
def web(serve, controller):
    controller.apply(FS)
    policies = ControllerPolicies(Client(Endpoint(url=controller.url)))
    return serve(tokens="operator {operator}\n", policies=policies)


def post(web, what, text, **given):
    return web.ask(f"/api/policy/{what}", "POST", {"text": text}, X_Headrace="1", **given)


def test_a_dry_run_says_what_would_change_and_changes_nothing(web, controller):
    before = controller.state()["policy_version"]
    reply = post(web, "check", CAPPED).document
    assert reply["applied"] is False
    assert {"at": "jobs.train.cap.bytes_per_s", "before": None, "after": "10M"} in reply["changes"]
    assert any("train" in each for each in reply["unknown"])
    assert controller.state()["policy_version"] == before


def test_applying_changes_the_controller(web, controller):
    before = controller.state()["policy_version"]
    assert post(web, "apply", CAPPED).status == 401
    assert controller.state()["policy_version"] == before
    reply = post(web, "apply", CAPPED, token=web.operator).document
    assert reply["applied"] is True
    assert controller.state()["policy_version"] == reply["version"] == before + 1
    assert "10M" in web.ask("/api/policy").document["text"]


def test_what_is_wrong_is_told_sentence_by_sentence(web):
    answer = post(web, "check", FS + "jobs: {train: {wieght: 3, cap: {bytes_per_s: lots}}}\n")
    assert answer.status == 422
    problems = answer.document["error"]["problems"]
    assert len(problems) == 2
    assert any("wieght" in p for p in problems)


@pytest.mark.parametrize(
    "text", ["a: [", "&a [*a]", "jobs: {'<script>\\x1b': {weight: -1}}", "- 1"]
)
def test_hostile_documents_are_refused_in_words(web, text):
    answer = post(web, "check", text)
    assert answer.status == 422
    assert b"\x1b" not in answer.body


def test_a_controller_that_is_gone_is_told(serve, tmp_path):
    policies = ControllerPolicies(Client(Endpoint(url=f"unix:{tmp_path}/nobody.sock")))
    web = serve(tokens="operator {operator}\n", policies=policies)
    answer = web.ask("/api/policy")
    assert (answer.status, "no controller listens" in answer.message) == (502, True)
    assert post(web, "check", FS).status == 502


def test_without_a_controller_there_is_no_policy(serve):
    web = serve(tokens="operator {operator}\n")
    assert web.ask("/api/policy").document["version"] is None
    assert post(web, "check", FS).status == 404


def test_the_text_of_a_policy_says_the_same():
    policy = parse_policy(
        CAPPED + "users: {'*': {weight: 2}}\nwhen_expired: {bytes_per_s: 1M}\nlease_s: 4\n"
    )
    assert parse_policy(policy_yaml(policy_document(policy))) == policy
