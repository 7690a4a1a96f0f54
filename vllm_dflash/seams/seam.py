"""A function of vLLM that we rely on, and whether it is as we expect."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_dflash.vllms_own import SWITCH_OFF

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34")


class UnsupportedVllmError(RuntimeError):
    """This vLLM is not one vllm-dflash was built for; the message names what differs."""


@dataclass(frozen=True)
class Seam:
    """A function or attribute of vLLM that a hook of ours depends on."""

    path: str
    """`module:attribute`, dots allowed in the attribute, and keys of a dictionary among them."""
    parameters: str | None = None
    """Names of the parameters we pass or receive, in order; None for what is not called. One with
    a question mark is not there in every version."""
    versions: str = ""
    """Of vLLM, that have it: a specifier such as `>=0.33`. Empty: all that we support."""

    def is_in(self, version: str) -> bool:
        """Whether this version of vLLM is to have it."""
        return SpecifierSet(self.versions).contains(Version(version).base_version)

    def accepts(self, found: Sequence[str]) -> bool:
        """Whether a function with these parameters will do."""
        if self.parameters is None:
            return True
        names = self.parameters.split()
        return list(found) == [
            name.removesuffix("?") for name in names if name[-1] != "?" or name[:-1] in found
        ]


def check_version(version: str) -> None:
    """Refuse a vLLM outside `SUPPORTED_VLLM`. Raises `UnsupportedVllmError`."""
    try:
        supported = Version(version).public in SUPPORTED_VLLM
    except InvalidVersion:
        supported = False
    if not supported:
        from vllm_dflash import __version__

        raise UnsupportedVllmError(
            f"vllm-dflash {__version__} supports vLLM {SUPPORTED_VLLM}, this is vLLM {version}."
            f" Install a matching pair. {SWITCH_OFF}."
        )


def compare(seams: tuple[Seam, ...]) -> None:
    """As `check_seams`, for any."""
    import vllm

    for seam in seams:
        if seam.versions and not seam.is_in(vllm.__version__):
            continue
        module, _, attribute = seam.path.partition(":")
        try:
            target: Any = import_module(module)
            for name in attribute.split("."):
                target = target[name] if isinstance(target, dict) else getattr(target, name)
        except (ImportError, AttributeError, KeyError) as error:
            raise UnsupportedVllmError(
                f"vllm-dflash relies on {seam.path}, which this vLLM does not have ({error})."
                f" {SWITCH_OFF}."
            ) from error
        if seam.parameters is None:
            continue
        found = list(inspect.signature(target).parameters)
        if not seam.accepts(found):
            expected = seam.parameters.split()
            raise UnsupportedVllmError(
                f"vllm-dflash relies on {seam.path}({', '.join(expected)}), but this vLLM"
                f" has {attribute.rpartition('.')[2]}({', '.join(found)})."
                f" {SWITCH_OFF}."
            )
