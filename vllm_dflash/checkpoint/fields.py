"""Reading single fields of a `config.json`, so that a bad one is refused by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_dflash.checkpoint.spec import DrafterError

MOST = {"block_size": 1024, "num_hidden_layers": 1024, "max_position_embeddings": 1 << 22}
"""Larger numbers than these are mistakes, and would only show as a lack of memory."""
LARGEST_INTEGER = 1 << 31


def shown(value: Any) -> str:
    """A value of a config in a message, however large it is."""
    written = repr(value)
    return written if len(written) <= 300 else f"{written[:300]}... ({len(written)} characters)"


@dataclass(frozen=True)
class ConfigFields:
    """Fields of a drafter's config, each either inside `dflash_config` or at top level."""

    model: str
    config: dict[str, Any]
    nested: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The value, wherever it stands; null counts as missing."""
        for source in (self.nested, self.config):
            if source.get(name) is not None:
                return source[name]
        return default

    def refuse(self, name: str, wanted: str, value: Any) -> DrafterError:
        """The error that says what a field must be, and what it is."""
        return DrafterError(
            f"drafter {self.model!r}: {name} must be {wanted}, config.json says {shown(value)}."
        )

    def integer(self, name: str, *, least: int = 1, default: Any = None) -> int:
        """A whole number within reason. Raises `DrafterError`."""
        value, most = self.get(name, default), MOST.get(name, LARGEST_INTEGER)
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"an integer from {least} to {most}", value)
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number. Raises `DrafterError`."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < LARGEST_INTEGER:
            raise self.refuse(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises `DrafterError`."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false", value)
        return value
