"""Merges patches into manifests. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


def patched(manifest: Any, patch: Any) -> Any:
    """Applies a patch to a manifest: mappings are merged, null removes a key, lists of named items are merged by name,
    and everything else is replaced."""
    if isinstance(manifest, Mapping) and isinstance(patch, Mapping):
        merged = dict(manifest)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = patched(merged.get(key), value)
        return merged
    if isinstance(manifest, list) and _all_named([*manifest, *(patch if isinstance(patch, list) else [None])]):
        by_name = {each["name"]: each for each in manifest}
        for each in patch:
            by_name[each["name"]] = patched(by_name.get(each["name"]), each)
        return list(by_name.values())
    return copy.deepcopy(patch)


def _all_named(entries: Sequence[Any]) -> bool:
    return all(isinstance(each, Mapping) and "name" in each for each in entries)
