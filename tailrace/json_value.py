"""The type of a value that is read from JSON or written as such."""

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None
