"""Find a policy by a name or a path, or from a class or an instance."""

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
    registered = [point.name for point in entry_points(group=GROUP)]
    return tuple(sorted({*SHIPPED, *registered}))


def resolve_policy(spec: str | type[Policy] | Policy) -> Policy:
    """Find a policy by its name, by "package.module:Class", or from a class (constructed without
    arguments) or an instance.

    A name or path may end with options, which must be Python literals:
    "colocated(drop_gradients=True)". Raises PolicyError: no such policy can be imported or
    constructed, or it has no `plan(view)` or no `name`.
    """
    policy: Any = spec
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(spec, str):
        path, positional, named = _name_and_options(spec)
        point = _entry_point(path)
        try:
            policy = point.load()
        except Exception as exc:
            raise PolicyError(
                f"policy {path!r} cannot be imported from {point.value}: {type(exc).__name__}: "
                f"{exc}"
            ) from exc
        if (positional or named) and not isinstance(policy, type):
            raise PolicyError(
                f"no policy {spec!r}: only a class takes options, and {path!r} is a "
                f"{type(policy).__name__}"
            )
    if isinstance(policy, type):
        if named:
            _refuse_unknown_options(spec, policy, named)
        try:
            policy = policy(*positional, **named)
        except Exception as exc:
            how = "with these options" if positional or named else "without arguments"
            raise PolicyError(f"policy {_shown(spec)} cannot be constructed {how}: {exc}") from exc
    if not callable(getattr(policy, "plan", None)):
        raise PolicyError(
            f"policy {_shown(spec)} has no method plan(view): write a class with a `name` and that "
            "method"
        )
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PolicyError(
            f"policy {_shown(spec)} needs a name matching {_NAME.pattern} (`name = ...` in its "
            f"class), not {name!r}"
        )
    return cast("Policy", policy)


def _refuse_unknown_options(spec: object, policy: type, named: Mapping[str, Any]) -> None:
    parameters = inspect.signature(policy).parameters.values()
    options = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            options.append(parameter.name)
    for name in named:
        if name not in options:
            raise PolicyError(
                f"policy {_shown(spec)} cannot be constructed with these options: no option "
                f"{name!r}{nearest(name, options)} (its options: {', '.join(options) or 'none'})"
            )


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"{ast.unparse(node)} is not a literal; write True, False, None, a number, or a word "
            "in quotes: 'optimizer_step'"
        ) from None


def _name_and_options(
    spec: str,
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The name in front of the bracket, and the positional and the named options inside."""
    name, bracket, options = spec.partition("(")
    if not bracket:
        return spec, (), {}
    try:
        call = ast.parse(f"policy({options}", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or any(keyword.arg is None for keyword in call.keywords)
        ):
            raise ValueError("expected one pair of brackets")
        positional = tuple(_literal(argument) for argument in call.args)
        named = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as exc:
        raise PolicyError(
            f"policy {spec!r}: options are literals in brackets, as in "
            f"'colocated(drop_gradients=True)': {exc}"
        ) from exc
    return name.strip(), positional, named


def _shown(spec: object) -> str:
    if isinstance(spec, str):
        return repr(spec)
    return getattr(spec, "__qualname__", type(spec).__qualname__)


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
    names = policy_names()
    raise PolicyError(
        f"no policy {spec!r}{nearest(spec, names) or '.'} Registered: {', '.join(names)}; or write "
        "'package.module:Class'."
    )
