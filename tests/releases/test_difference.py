"""Two descriptions, field by field."""

from adaptive_spec.releases.difference import Difference, differences


def test_only_what_differs_by_its_path() -> None:
    before = {
        "thresholds": {"code": {"temperature": 1.0, "survival": [0.5, 0.4]}},
        "provenance": {"parent": 0, "packages": {"torch": "2"}},
        "gate": {"checks": [{"name": "goodput", "passed": False}]},
    }
    after = {
        "thresholds": {"code": {"temperature": 1.5, "survival": [0.5, 0.4]}, "sql": {"temperature": 1.0}},
        "provenance": {"parent": 1, "packages": {"torch": "2"}},
        "gate": {"checks": [{"name": "integrity", "passed": True}, {"name": "goodput", "passed": True}]},
    }
    assert differences(before, before) == []
    assert differences(before, after) == [
        Difference("thresholds", "code.temperature", 1.0, 1.5),
        Difference("thresholds", "sql.temperature", None, 1.0),
        Difference("provenance", "parent", 0, 1),
        Difference("gate", "checks.goodput.passed", False, True),
        Difference("gate", "checks.integrity.name", None, "integrity"),
        Difference("gate", "checks.integrity.passed", None, True),
    ]
    assert differences({}, {"thresholds": {"code": {"temperature": 2.0}}})[0].after == 2.0
