"""What an API server does with a custom resource: defaults, unknown fields, types, list keys, CEL rules.

`CustomResource.mistakes` takes the CRD's structural schema apart by itself for all but plain JSON Schema, which
jsonschema checks. Transition rules (those that name `oldSelf`) run only where an old object is given, as on a server.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import celpy
import celpy.adapter
import jsonschema
import yaml

_META = {"name", "generateName", "namespace", "labels", "annotations", "finalizers", "ownerReferences"}
_INT_BOUNDS = {"int32": 2**31, "int64": 2**63}


class CustomResource:
    """The served and stored version of one CRD."""

    def __init__(self, path: Path) -> None:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        crd = yaml.load(text, Loader=yaml.CSafeLoader)
        (version,) = (v for v in crd["spec"]["versions"] if v["storage"])
        self.api_version = f"{crd['spec']['group']}/{version['name']}"
        self.kind = crd["spec"]["names"]["kind"]
        self._schema = version["schema"]["openAPIV3Schema"]
        self._validator = jsonschema.Draft4Validator(_plain(self._schema))
        self._programs: dict[str, Any] = {}

    def mistakes(self, manifest: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        """One line for each mistake; empty for an object that a server would store."""
        value = copy.deepcopy(manifest)
        _apply_defaults(value, self._schema)
        previous = copy.deepcopy(old)
        if previous is not None:
            _apply_defaults(previous, self._schema)
        found = [f"metadata.{key}: unknown field" for key in value["metadata"].keys() - _META]
        self._walk(value, self._schema, "", previous, found)
        found += [
            f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message[:200]}"
            for error in self._validator.iter_errors(value)
        ]
        return found

    def _walk(self, value: Any, schema: dict[str, Any], path: str, old: Any, found: list[str]) -> None:
        if isinstance(value, dict):
            properties, others = schema.get("properties", {}), schema.get("additionalProperties")
            for key, item in value.items():
                at = f"{path}.{key}" if path else key
                if path == "" and key in ("apiVersion", "kind", "metadata"):
                    continue
                before = old.get(key) if isinstance(old, dict) else None
                if key in properties:
                    self._walk(item, properties[key], at, before, found)
                elif isinstance(others, dict):
                    self._walk(item, others, at, before, found)
                elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                    found.append(f"{at}: unknown field")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self._walk(item, schema.get("items", {}), f"{path}[{index}]", None, found)
            keys = schema.get("x-kubernetes-list-map-keys")
            if keys:
                seen = [tuple(item.get(key) for key in keys) for item in value]
                found += [f"{path}: duplicate {dict(zip(keys, one, strict=True))}" for one in _twice(seen)]
        elif isinstance(value, int) and not isinstance(value, bool):
            bound = _INT_BOUNDS.get(schema.get("format", ""))
            if bound is not None and not -bound <= value < bound:
                found.append(f"{path}: {value} does not fit {schema['format']}")
        for rule in schema.get("x-kubernetes-validations", []):
            if "oldSelf" in rule["rule"] and old is None:
                continue
            if not self._holds(rule["rule"], value, old):
                found.append(f"{path}: {rule.get('message', rule['rule'])}")

    def _holds(self, rule: str, value: Any, old: Any) -> bool:
        if rule not in self._programs:
            environment = celpy.Environment()
            self._programs[rule] = environment.program(environment.compile(rule))
        context = {"self": celpy.adapter.json_to_cel(value)}
        if old is not None:
            context["oldSelf"] = celpy.adapter.json_to_cel(old)
        return bool(self._programs[rule].evaluate(context))


def load_all(folder: Path) -> dict[tuple[str, str], CustomResource]:
    """Every CRD of a folder by (apiVersion, kind)."""
    found = [CustomResource(path) for path in sorted(folder.iterdir()) if ".yaml" in path.suffixes]
    return {(crd.api_version, crd.kind): crd for crd in found}


def _apply_defaults(value: Any, schema: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            if "default" in part and key not in value:
                value[key] = copy.deepcopy(part["default"])
            if key in value:
                _apply_defaults(value[key], part)
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            for key in value.keys() - schema.get("properties", {}).keys():
                _apply_defaults(value[key], others)
    elif isinstance(value, list):
        for item in value:
            _apply_defaults(item, schema.get("items", {}))


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema part: OpenAPI's `nullable`, and integer-or-string, said in JSON Schema's words."""

    def turn(node: Any) -> Any:
        if isinstance(node, list):
            return [turn(item) for item in node]
        if not isinstance(node, dict):
            return node
        out = {key: turn(item) for key, item in node.items() if not key.startswith("x-kubernetes") and key != "format"}
        if node.get("x-kubernetes-int-or-string"):
            out.pop("anyOf", None)
            out["type"] = ["integer", "string"]
            # A pattern of an integer-or-string binds only its strings, as in JSON Schema.
        if node.get("nullable") is True:
            out["type"] = [out["type"], "null"] if isinstance(out.get("type"), str) else out.get("type", "null")
        return out

    turned = turn(schema)
    assert isinstance(turned, dict)
    return turned


def _twice(values: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    texts = [json.dumps(value, default=str) for value in values]
    return [value for index, value in enumerate(values) if texts.index(texts[index]) < index]
