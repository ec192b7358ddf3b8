"""Check whether the installed version of another package has the non-public names that are used here.

A list of uses says for each module, class or function which of its names are used, and which parameters by
name. Another version may lack some; checking at the start gives one clear error instead of an AttributeError
in the middle of a request.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Final, TypeAlias

Uses: TypeAlias = Mapping[str, str]
"""Maps `module` or `module:Class` to names separated by spaces. `name(a, b)`: a function or class that is
called with the keyword arguments a and b."""

_NAME: Final = re.compile(r"(\w+)(?:\(([\w,\s]*)\))?")


def missing(uses: Uses) -> list[str]:
    """Return the uses that are missing, each formatted like `module:Class.name`; imports the named
    modules."""
    return [found for owner, names in uses.items() for found in _missing_of(owner, names)]


def names(uses: Uses) -> set[str]:
    """Return every used name, including those of the classes themselves."""
    owners = {owner.partition(":")[2] for owner in uses}
    return {name for text in uses.values() for name, _ in _NAME.findall(text)} | owners - {""}


def _missing_of(owner: str, text: str) -> Iterator[str]:
    module_name, _, class_name = owner.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        yield module_name
        return
    module_or_class: object = module
    if class_name:
        module_or_class = getattr(module, class_name, None)
        if module_or_class is None:
            yield owner
            return
    known = _names_of(module_or_class)
    between = "." if class_name else ":"
    for name, parameters in _NAME.findall(text):
        if name not in known and not hasattr(module_or_class, name):
            yield f"{owner}{between}{name}"
        elif parameters:
            accepted = _parameters(getattr(module_or_class, name))
            yield from (
                f"{owner}{between}{name}({parameter})"
                for parameter in re.findall(r"\w+", parameters)
                if accepted is not None and parameter not in accepted
            )


def _parameters(function: object) -> set[str] | None:
    """Return the names of the parameters; None if any are accepted."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _names_of(owner: object) -> set[str]:
    """Return the names that a module or class defines; for a class also those that its methods set on
    objects."""
    if isinstance(owner, ModuleType) or not inspect.isclass(owner):
        return set(dir(owner))
    names = set(dir(owner))
    for base in owner.__mro__:
        names.update(vars(base).get("__annotations__", {}))
        for member in vars(base).values():
            names.update(_stored_by(member))
    return names


def _stored_by(member: object) -> Iterator[str]:
    function = member.fget if isinstance(member, property) else member
    function = getattr(function, "__func__", function)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if isinstance(code, CodeType):
        yield from _stored_in(code)


def _stored_in(code: CodeType) -> Iterator[str]:
    """Yield attributes that a function sets, on whatever object."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored_in(constant)
