"""Settings that are declared once, as fields of a frozen dataclass: each has its default, range and help, and
gives a command its option."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, Final, TypeVar, get_type_hints

import click

from tailrace.brief_help import Rare

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., object])

_OPTION: Final = "option"


class OneOf(click.Choice):  # type: ignore[type-arg]
    """Parse the value of one of an enumeration's members."""

    def __init__(self, members: type[enum.Enum]) -> None:
        super().__init__([member.value for member in members])
        self._members = members

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the member. Raise click.BadParameter."""
        return self._members(super().convert(value, param, ctx))


class Parsed(click.ParamType[Any]):
    """Parse a value by a function, whose error names what is wrong with it."""

    name = "value"

    def __init__(self, parse: Callable[[str], object], error: type[Exception]) -> None:
        self._parse = parse
        self._error = error

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the function does. Raise click.BadParameter."""
        try:
            return self._parse(value)
        except self._error as error:
            self.fail(str(error), param, ctx)


def setting(default: T, help_text: str, flag: str = "", /, rare: bool = False, **attributes: Any) -> T:
    """Declare a field that a command has as an option.

    `flag`: `--that`, unless it is the field's name. `rare`: few need it, so that only --help=all shows it.
    `attributes`: as click.option takes them; `type` is needed for whatever has a range.
    """
    if rare:
        attributes["cls"] = Rare
    declared: T = _field(flag, help_text, attributes, default=default)
    return declared


def empty_setting(factory: Callable[[], T], help_text: str, flag: str, /, **attributes: Any) -> T:
    """Declare one as `setting` does whose default is a new object of the factory each time."""
    declared: T = _field(flag, help_text, {"default": (), **attributes}, default_factory=factory)
    return declared


def _field(flag: str, help_text: str, attributes: dict[str, Any], **default: Any) -> Any:
    return field(**default, metadata={_OPTION: (flag, {"help": help_text, **attributes})})


def options_of(settings: type) -> dict[str, str]:
    """Return the flags of the options that these settings have, by the name of the field."""
    return {each.name: _flag(each) for each in _declared(settings)}


def settings_options(settings: type[T], name: str) -> Callable[[Command], Command]:
    """Add the options of these settings, nested ones included, to a click command, which gets the settings
    whole as `name`. A field without an option keeps its default."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(*args: object, **values: object) -> object:
            values[name] = _collect(settings, values)
            return function(*args, **values)

        decorated: Any = command
        for declared in reversed([*_declared(settings)]):
            decorated = click.option(_flag(declared), declared.name, **_attributes(declared))(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def _declared(settings: type) -> Iterator[Field[Any]]:
    """Yield the fields that are options, those of nested settings in their place."""
    hints = get_type_hints(settings)
    for each in fields(settings):
        if _OPTION in each.metadata:
            yield each
        elif is_dataclass(hints[each.name]):
            yield from _declared(hints[each.name])


def _flag(declared: Field[Any]) -> str:
    flag: str = declared.metadata[_OPTION][0]
    return flag or f"--{declared.name.replace('_', '-')}"


def _attributes(declared: Field[Any]) -> Mapping[str, Any]:
    given: dict[str, Any] = declared.metadata[_OPTION][1]
    default = given.get("default", declared.default)
    if isinstance(default, enum.Enum):
        default = default.value
    shows = default not in (None, "", ()) and not given.get("is_flag")
    return {"default": default, "show_default": shows, **given}


def _collect(settings: type[T], values: dict[str, object]) -> T:
    hints = get_type_hints(settings)
    arguments: dict[str, object] = {}
    for each in fields(settings):  # type: ignore[arg-type]
        if _OPTION in each.metadata:
            arguments[each.name] = values.pop(each.name)
        elif is_dataclass(nested := hints[each.name]):
            arguments[each.name] = _collect(nested, values)  # type: ignore[arg-type]
    return settings(**arguments)
