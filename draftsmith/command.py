"""`key=value` arguments into a flat dataclass, for the commands that need no recipe."""

import dataclasses
import difflib
import json
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse(schema: type[T], argv: list[str]) -> T:
    """An instance of the dataclass `schema`; ValueError names what is wrong and what would be
    right.
    """
    hints = get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(fields)}"
            raise ValueError(f"argument {argument!r}: unknown key {key!r}; {hint}")
        if not equals:
            raise ValueError(f"argument {argument!r}: got no value, expected {key}=...")
        given[key] = _convert(key, text, hints[key])
    missing = [
        name
        for name, field in fields.items()
        if name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"missing: {' '.join(f'{name}=...' for name in missing)}")
    return schema(**given)


def _convert(key: str, text: str, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return _texts(key, text)
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if type(None) in get_args(hint) and text.lower() in ("", "none", "null"):
        return None
    kind = kinds[0]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key}: got {text!r}, expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}: got {text!r}, expected {kind.__name__}") from None


def _texts(key: str, text: str) -> tuple[str, ...]:
    """One text as it stands, or a JSON list of them."""
    if not text.startswith("["):
        return (text,) if text else ()
    try:
        texts = json.loads(text)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ValueError(f'{key}: got {text!r}, expected a text, or a list: ["one", "another"]')
    return tuple(texts)
