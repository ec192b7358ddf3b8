"""Declare parameters of policies and batch orders, and parse the values that users set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from tailrace.bounded import shown
from tailrace.durations import in_seconds
from tailrace.suggestion import did_you_mean

Value: TypeAlias = bool | int | float | str
V = TypeVar("V", bool, int, float, str)
NO_PARAMETERS: Final[Mapping[str, Value]] = MappingProxyType({})

_TYPE_NAMES: Final[Mapping[type[Value], str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a word",
}
_BOOLEANS: Final = {"true": True, "false": False}


class ParameterError(ValueError):
    """A parameter is unknown or has a value that is not allowed; the message names the policy, the parameter,
    the value and what is allowed."""


# Without a `maximum`: beyond, an integer is lost in the arithmetic of floats, and what is computed from a
# number may be infinite.
_LARGEST: Final[Mapping[type[Value], float]] = {int: 2**53, float: 1e12}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, as a class of `Parametrized` declares it."""

    # Of the same type as all of its values.
    default: Value
    description: str
    # Empty: dimensionless, or a word.
    unit: str = ""
    # Source of the default: section, algorithm and line of a paper, or "ours".
    source: str = "ours"
    # Both inclusive.
    minimum: float | None = None
    maximum: float | None = None
    # Allowed values of a `str` parameter; empty: any.
    choices: tuple[str, ...] = ()
    # That of the attribute which declares it.
    name: str = ""

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a contradictory declaration."""
        if self.type not in _TYPE_NAMES:
            raise TypeError(f"parameter {self.name!r}: {self.default!r} is not a bool, int, float or str")
        if not all(isinstance(text, str) for text in (self.description, self.unit, self.source)):
            raise TypeError(f"parameter {self.name!r}: description, unit and source are texts")
        if type(self.choices) is not tuple or not all(isinstance(each, str) for each in self.choices):
            raise TypeError(f"parameter {self.name!r}: choices is {self.choices!r}, not a tuple of texts")
        if self.choices and self.type is not str:
            raise TypeError(f"parameter {self.name!r}: only a str parameter has choices")
        try:
            self.parse(self.default)
        except ValueError as error:
            raise ValueError(f"default {self.default!r}: {error}") from error

    @property
    def type(self) -> type[Value]:
        """Return the type of its values."""
        return type(self.default)

    @property
    def type_name(self) -> str:
        """Return `bool`, `int`, `float` or `str`."""
        return self.type.__name__

    @property
    def is_time(self) -> bool:
        """Return whether values may have a unit of time."""
        return self.type is float and self.unit.split(" ")[0] == "s"

    @property
    def allowed(self) -> str:
        """Describe the allowed values in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return self._within(self.minimum, self.maximum)

    def _within(self, minimum: float | None, maximum: float | None) -> str:
        description = _TYPE_NAMES[self.type]
        if minimum is not None and maximum is not None:
            return f"{description} from {minimum:g} to {maximum:g}"
        if minimum is not None:
            return f"{description} of at least {minimum:g}"
        if maximum is not None:
            return f"{description} of at most {maximum:g}"
        return description

    def parse(self, value: Value) -> Value:
        """Convert a word of a command line or a JSON value to the parameter's type.

        Raise ValueError, whose message is `allowed`.
        """
        converted = self._convert(value)
        if isinstance(converted, str):
            in_range = not self.choices or converted in self.choices
        elif isinstance(converted, bool):
            in_range = True
        else:
            largest = _LARGEST[self.type]
            least = -largest if self.minimum is None else self.minimum
            most = largest if self.maximum is None else self.maximum
            in_range = least <= converted <= most
            if not in_range and abs(converted) > largest:
                # The range in words need not name the bound that it is beyond.
                raise ValueError(self._within(least, most))
        if not in_range:
            raise ValueError(self.allowed)
        return converted

    def _convert(self, value: Value) -> Value:
        try:
            if self.type is str and isinstance(value, str):
                return value
            if isinstance(value, str) and ("_" in value or value != value.strip()):
                # Python would read 1_0 as 10.
                raise ValueError(self.allowed)
            if self.type is bool:
                return value if isinstance(value, bool) else _BOOLEANS[str(value).lower()]
            if self.type is float and not isinstance(value, bool):
                if isinstance(value, str) and self.is_time:
                    value = in_seconds(value)
                return float(value)
            if self.type is int and not isinstance(value, bool):
                # JSON and protobuf have no integers of their own: 500.0 is 500.
                if isinstance(value, float) and value.is_integer():
                    return int(value)
                if isinstance(value, (int, str)):
                    return int(value)
        except (ValueError, KeyError, OverflowError):
            pass
        raise ValueError(self.allowed)


def parameter(
    default: V,
    description: str,
    *,
    unit: str = "",
    source: str = "ours",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> V:
    """Declare an attribute of a class of `Parametrized` that users may set. See Parameter."""
    declared: Any = Parameter(default, description, unit, source, minimum, maximum, choices)
    return declared  # type: ignore[no-any-return]


class Parametrized:
    """A class that declares each of its parameters once, as an attribute:

        watermark: float = parameter(0.01, "share of KV that admission leaves free", minimum=0.0, maximum=1.0)

    An object has as that attribute what its constructor was given, else the default.
    """

    # What the class and those above it declare.
    parameters: ClassVar[tuple[Parameter, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Take the declarations from the attributes of the class, which then are the defaults."""
        super().__init_subclass__(**options)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Parameter)}
        for name, value in own.items():
            setattr(cls, name, value.default)
        if own:
            above = tuple(p for p in cls.parameters if p.name not in own)
            cls.parameters = (*above, *(replace(value, name=name) for name, value in own.items()))

    def __init__(self, **values: Any) -> None:
        """Raise TypeError for a value of what is not a parameter. Values are not checked here."""
        for declared in self.parameters:
            setattr(self, declared.name, values.pop(declared.name, declared.default))
        for name in values:
            raise TypeError(f"{type(self).__name__} has no parameter {name!r}")


def parse_parameters(
    owner: str, declared: Iterable[Parameter], assigned: Mapping[str, Value]
) -> dict[str, Value]:
    """Return a value for every declared parameter: the given one, else the default.

    `owner` names the policy in errors ("policy 'pascal'"). Raise ParameterError for a name that is not
    declared or a value that is not allowed.
    """
    by_name = {parameter.name: parameter for parameter in declared}
    for name in assigned:
        if name not in by_name:
            known = f"its parameters: {', '.join(sorted(by_name))}" if by_name else "it has no parameters"
            meant = did_you_mean(name, by_name)
            raise ParameterError(f"{owner} has no parameter {shown(name)}{meant}; {known}")
    values: dict[str, Value] = {}
    for name, parameter in by_name.items():
        if name not in assigned:
            values[name] = parameter.default
            continue
        try:
            values[name] = parameter.parse(assigned[name])
        except ValueError as error:
            unit = (
                f" ({parameter.unit}{', such as 2s or 150ms' * parameter.is_time})" if parameter.unit else ""
            )
            raise ParameterError(
                f"{owner}, parameter {name!r}: {shown(format_value(assigned[name]))} is not allowed; "
                f"it is {error}{unit}"
            ) from error
    return values


def format_value(value: Value) -> str:
    """Format a value as users type it and `Parameter.parse` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def read_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Parse `key=value` words into a dict. Raise ParameterError."""
    values: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise ParameterError(f"{shown(assignment)} is not key=value")
        if key in values:
            raise ParameterError(f"{shown(key)} is given twice")
        values[key] = value
    return values
