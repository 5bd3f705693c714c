"""What to do about a key of the command line that Hydra refuses: it is not there, or there already."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.config import OptimizerExtras, keys_of, known_keys
from async_rl.config_check import nearest
from async_rl.config_engine import missing_key_hint
from async_rl.targets import HYDRA_KEYS, Parameters, parameters_of

_OPEN_SECTIONS = ("rollout.mixture", "run.lightning")
"""Sections whose keys are the user's, none of which are there by default."""
_ABSENT = (
    r"Could not override '([^']+)'|Key '([^']+)' is not in struct|Could not delete from config. '([^']+)' does not"
)
_PRESENT = r"Could not append to config. An item is already at '([^']+)'"


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """A key that Hydra refuses.

    Attributes:
        key: Its dotted path.
        given: The override it stands in.
        present: It is there already; else it is not there.
    """

    key: str
    given: str
    present: bool

    @classmethod
    def in_message(cls, message: str, overrides: Iterable[str]) -> RefusedKey | None:
        """The key a message of Hydra's is about, or ``None``."""
        present = re.search(_PRESENT, message)
        found = present or re.search(_ABSENT, message)
        if found is None:
            return None
        key = next(filter(None, found.groups()))
        given = next((o for o in overrides if key_of(o) == key_of(key)), f"~{key}" if "delete" in found[0] else key)
        return cls(key, given, present is not None)

    def hint(self, config: Mapping[str, Any]) -> str:
        """One line on what is wrong and what to give instead.

        Args:
            config: The whole config without the override.
        """
        if hint := missing_key_hint(self.key):
            return f"{self.key}: {hint}"  # without the value, which may be a secret
        return f"{self.given}: {self._fix(config)}"

    def _fix(self, config: Mapping[str, Any]) -> str:
        if self.present:
            return f"{self.key} is there already; change it without the plus: {self.given.lstrip('+')}"
        section, name, rest, node = _deepest(config, self.key)
        absent = ".".join(filter(None, (section, name)))
        added = f"is added with a plus: +{self.given}"
        if not isinstance(node, Mapping):
            if section in _OPEN_SECTIONS:
                return f"a key of {section} {added}"
            return f"{section} is {'null' if node is None else node!r} and has no keys; give {section}=..."
        if self.given.startswith("~"):
            return f"there is no key {absent} to leave out; " + _near_or_all(section, name, "~", rest, node)
        if section in _OPEN_SECTIONS:
            return f"a key of {section} {added}"
        if "_target_" in node:
            return self._argument(section, name, rest, node)
        if "_target_" in self.given and not nearest(name, map(str, node)):
            return f"a new key of {section or 'the config'} {added}"
        close = nearest(name, map(str, node))
        if section:
            if close is None and (far := nearest(name, _elsewhere(config, section))):
                return f"there is no key {absent}; did you mean {far}{rest}?"
            return f"there is no key {absent}; " + _near_or_all(section, name, "", rest, node)
        if close is None or not _has(config, close + rest):
            close, rest = nearest(self.key, _elsewhere(config)), ""
        return f"there is no key {self.key}; " + (
            f"did you mean {close}{rest}?" if close else "see python train.py --help"
        )

    def _argument(self, section: str, name: str, rest: str, node: Mapping[str, Any]) -> str:
        """What to do about an argument that a ``_target_`` node does not hold."""
        parameters = _parameters(str(node["_target_"]))
        names = set(parameters.annotations) | (set(keys_of(OptimizerExtras)) if section == "optimizer" else set())
        value = self.given.partition("=")[2]
        if name in names:
            return f"{section} holds no {name} yet; it is added with a plus: +{self.given}"
        close = nearest(name, {*map(str, node), *names} - HYDRA_KEYS)
        if close is not None:
            plus, value = ("", "") if close in node else ("+", f"={value}")
            return f"there is no key {section}.{name}; did you mean {plus}{section}.{close}{rest}{value}?"
        if parameters.open:
            return f"an argument that {section} does not hold yet is added with a plus: +{self.given}"
        takes = ", ".join(sorted(names)) or "no arguments"
        return f"there is no key {section}.{name}; {node['_target_']} takes {takes}"


def key_of(override: str) -> str:
    """The key or group an override is about."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def without(key: str, overrides: Iterable[str]) -> list[str]:
    """The overrides of other keys."""
    return [o for o in overrides if key_of(o) != key_of(key)]


def paths(node: Any, prefix: str = "") -> Iterator[str]:
    """Every key in a config, sections included, as a dotted path."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{prefix}{name}"
        yield from paths(value, f"{prefix}{name}.")


def _deepest(config: Mapping[str, Any], key: str) -> tuple[str, str, str, Any]:
    """The section a key reaches, the first name that is not in it, what comes after, and the section's node."""
    node: Any = config
    parts = key.split(".")
    for n, part in enumerate(parts):
        if not isinstance(node, Mapping) or part not in node:
            return ".".join(parts[:n]), part, "".join(f".{p}" for p in parts[n + 1 :]), node
        node = node[part]
    return key, "", "", node


def _near_or_all(section: str, name: str, sign: str, rest: str, node: Mapping[str, Any]) -> str:
    close = nearest(name, map(str, node))
    path = ".".join(filter(None, (section, close)))
    return (
        f"did you mean {sign}{path}{rest}?" if close else f"{section or 'the config'} has {', '.join(map(str, node))}"
    )


def _elsewhere(config: Mapping[str, Any], section: str = "") -> Collection[str]:
    """The keys of the config and of the schema, but for the section itself and what it is in."""
    around = {section[:n] for n, sign in enumerate(f"{section}.") if sign == "."}
    return [k for k in {*known_keys(), *paths(config)} - around if not k.endswith("._target_")]


def _has(config: Mapping[str, Any], key: str) -> bool:
    return key in set(paths(config))


def _parameters(target: str) -> Parameters:
    """Those of a target; open where they can't be known."""
    try:
        found = parameters_of(target)
    except LookupError:
        found = None
    return found or Parameters({}, frozenset(), open=True)
