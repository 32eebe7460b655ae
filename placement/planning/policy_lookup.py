"""Find a policy from what the user gave: a name, a path, a class or an instance."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from placement.core.errors import PolicyError
from placement.core.settings import nearest
from placement.core.states import Policy

GROUP = "placement.policies"
SHIPPED = {
    "colocated": "placement.policies.colocated:Colocated",
    "resident": "placement.policies.resident:Resident",
    "async_rollout": "placement.policies.async_rollout:AsyncRollout",
    "cyclic": "placement.policies.cyclic:Cyclic",
}
"""The policies of this package by name. The entry points name them, too; this table also works in a
checkout that is not installed."""

_PATH = re.compile(r"[\w.]+:[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def policy_names() -> tuple[str, ...]:
    """The names of all known policies, sorted: the shipped ones and the entry points of the group
    "placement.policies"."""
    return tuple(sorted({*SHIPPED, *(point.name for point in entry_points(group=GROUP))}))


def resolve_policy(spec: str | type[Policy] | Policy) -> Policy:
    """Find a policy by its name, by "package.module:Class", or from a class (constructed without
    arguments) or an instance.

    A name or path may end with options, which must be Python literals:
    "colocated(drop_gradients=True)". Raises PolicyError: no such policy can be imported or
    constructed, or what was found has no `plan(view)` or no `name`.
    """
    found: Any = spec
    positional, named = tuple[Any, ...](), dict[str, Any]()
    if isinstance(spec, str):
        path, positional, named = _with_options(spec)
        point = _entry_point(path)
        try:
            found = point.load()
        except Exception as exc:
            raise PolicyError(
                f"policy {path!r} cannot be imported from {point.value}: {type(exc).__name__}: "
                f"{exc}"
            ) from exc
        if (positional or named) and not isinstance(found, type):
            raise PolicyError(
                f"no policy {spec!r}: only a class takes options, and {path!r} is a "
                f"{type(found).__name__}"
            )
    if isinstance(found, type):
        if named:
            _refuse_unknown_options(spec, found, named)
        try:
            found = found(*positional, **named)
        except Exception as exc:
            how = "with these options" if positional or named else "without arguments"
            raise PolicyError(f"policy {_shown(spec)} cannot be constructed {how}: {exc}") from exc
    if not callable(getattr(found, "plan", None)):
        raise PolicyError(
            f"policy {_shown(spec)} has no method plan(view): write a class with a `name` and that "
            "method"
        )
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PolicyError(
            f"policy {_shown(spec)} needs a name matching {_NAME.pattern} (`name = ...` in its "
            f"class), not {name!r}"
        )
    return cast("Policy", found)


def _refuse_unknown_options(spec: object, policy: type, named: Mapping[str, Any]) -> None:
    parameters = inspect.signature(policy).parameters.values()
    known = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    unknown = [name for name in named if name not in known]
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise PolicyError(
            f"policy {_shown(spec)} cannot be constructed with these options: no option "
            f"{unknown[0]!r}{nearest(unknown[0], known)} (its options: "
            f"{', '.join(known) or 'none'})"
        )


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"{ast.unparse(node)} is not a literal; write True, False, None, a number, or a word "
            "in quotes: 'optimizer_step'"
        ) from None


def _with_options(spec: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Split into the name in front of the bracket, and the positional and the named options
    inside."""
    name, bracket, rest = spec.partition("(")
    if not bracket:
        return spec, (), {}
    try:
        call = ast.parse(f"policy({rest}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or any(each.arg is None for each in call.keywords)
        ):
            raise ValueError("expected one pair of brackets")
        positional = tuple(_literal(each) for each in call.args)
        named = {str(each.arg): _literal(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as exc:
        raise PolicyError(
            f"policy {spec!r}: options are literals in brackets, as in "
            f"'colocated(drop_gradients=True)': {exc}"
        ) from exc
    return name.strip(), positional, named


def _shown(spec: object) -> str:
    return (
        repr(spec)
        if isinstance(spec, str)
        else getattr(spec, "__qualname__", type(spec).__qualname__)
    )


def _entry_point(spec: str) -> EntryPoint:
    """The entry point of a policy, given by a shipped name, a registered name, or a path."""
    if spec in SHIPPED:
        return EntryPoint(spec, SHIPPED[spec], GROUP)
    registered = {point.value: point for point in entry_points(group=GROUP) if point.name == spec}
    if len(registered) > 1:
        raise PolicyError(
            f"policy {spec!r} is registered more than once: {', '.join(sorted(registered))}; name "
            "one of them instead"
        )
    if registered:
        return next(iter(registered.values()))
    if _PATH.fullmatch(spec):
        return EntryPoint(spec, spec, GROUP)
    known = policy_names()
    raise PolicyError(
        f"no policy {spec!r}{nearest(spec, known) or '.'} Registered: {', '.join(known)}; or write "
        "'package.module:Class'."
    )
