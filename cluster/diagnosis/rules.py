"""Symptoms as data: `rules.yaml` says which numbers mean what; this file only compares.

A condition is `name operator number` or `name operator other_name`. A rule is present when all its conditions hold,
absent when one does not, and undecided when a number is missing: then the missing ones are named.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from cluster.config import Section

Verdict = Literal["present", "absent", "undecided"]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Rule(Section):
    """One symptom.

    Attributes:
        when: conditions; all must hold.
        shows: numbers to print with the finding, beside those of `when`.
        stage: where in a request's life it happens; resource: what is short there.
        confirm, refute: what to measure next.
    """

    id: str
    symptom: str
    cause: str
    stage: str
    resource: str
    lever: str
    cost: str
    confirm: str
    refute: str
    when: tuple[str, ...] = Field(min_length=1)
    shows: tuple[str, ...] = ()

    @field_validator("when")
    @classmethod
    def _comparisons(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            _parts(text)
        return value


class Finding(Section):
    """What one rule says of some evidence. `numbers` are those that decided, `missing` those that would have."""

    rule: Rule
    verdict: Verdict
    numbers: dict[str, float]
    missing: tuple[str, ...] = ()
    failed: str | None = None


@cache
def load_rules() -> tuple[Rule, ...]:
    """The rules in the package."""
    raw = yaml.safe_load((files("cluster.diagnosis") / "rules.yaml").read_text(encoding="utf-8"))
    return tuple(Rule.model_validate(entry) for entry in raw)


def examine(evidence: Mapping[str, float], rules: Sequence[Rule] | None = None) -> list[Finding]:
    """Every rule's finding: present ones first, then undecided, then absent."""
    order: dict[str, int] = {"present": 0, "undecided": 1, "absent": 2}
    findings = [_apply(rule, evidence) for rule in (load_rules() if rules is None else rules)]
    return sorted(findings, key=lambda f: order[f.verdict])


def _apply(rule: Rule, evidence: Mapping[str, float]) -> Finding:
    missing: list[str] = []
    failed: str | None = None
    numbers: dict[str, float] = {}
    for text in rule.when:
        left, compare, right = _parts(text)
        a, b = evidence.get(left), _value(right, evidence)
        for name, value in ((left, a), (right, b)):
            if value is None:
                missing.append(name)
            elif name in evidence:
                numbers[name] = value
        if a is not None and b is not None and not compare(a, b) and failed is None:
            failed = text
    numbers |= {name: evidence[name] for name in rule.shows if name in evidence}
    # One condition that fails decides, whatever is not known of the others.
    verdict: Verdict = "absent" if failed else "undecided" if missing else "present"
    return Finding(rule=rule, verdict=verdict, numbers=numbers, missing=tuple(missing), failed=failed)


def _parts(text: str) -> tuple[str, Callable[[float, float], bool], str]:
    words = text.split()
    if len(words) != 3 or words[1] not in _OPERATORS:
        raise ValueError(f"{text!r} is no comparison; write `name > number`")
    return words[0], _OPERATORS[words[1]], words[2]


def _value(word: str, evidence: Mapping[str, float]) -> float | None:
    try:
        return float(word)
    except ValueError:
        return evidence.get(word)


def as_json(finding: Finding) -> dict[str, Any]:
    """For `pdserve diagnose --json`."""
    r = finding.rule
    return {
        "id": r.id,
        "verdict": finding.verdict,
        "symptom": r.symptom,
        "cause": r.cause,
        "stage": r.stage,
        "resource": r.resource,
        "lever": r.lever,
        "cost": r.cost,
        "confirm": r.confirm,
        "refute": r.refute,
        "numbers": finding.numbers,
        "missing": list(finding.missing),
        "failed": finding.failed,
    }
