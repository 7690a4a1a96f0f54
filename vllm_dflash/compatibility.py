"""Whether our hooks fit this vLLM; checked in the front end, before anything starts.

vLLM's sources are read, not run: workers and schedulers have not started yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from packaging.version import Version

from vllm_dflash import __version__
from vllm_dflash.seams import SUPPORTED_VLLM, Seams, UnsupportedVllmError, parse_version
from vllm_dflash.vllm_sources import MissingError, Sources, imported_by, parameters_of

OLDEST = min(Version(one.version) for one in SUPPORTED_VLLM)


def untested(version: str) -> str:
    """Warning about a vLLM that our tests do not run with; empty if they do.

    They run with releases in `SUPPORTED_VLLM`. A later release, a prerelease, a nightly or a build
    without a version may contain anything.
    """
    parsed = parse_version(version)
    if not parsed.is_prerelease and parsed.public in SUPPORTED_VLLM:
        return ""
    return (
        f"vllm-dflash {__version__} was never tested with vLLM {version}, only with"
        f" {SUPPORTED_VLLM}. Everything it relies on is there, so it runs."
    )


def why_unfit(seams: Seams, files: Iterable[Path] = ()) -> str | None:
    """Why we cannot run engines with this vLLM, and what to install; None if everything fits.

    `files`: ours that these processes import. If tests do not run with this vLLM, whatever they
    import from it has to exist too.
    """
    import vllm

    version = vllm.__version__
    ours = f"vllm-dflash {__version__} supports vLLM {SUPPORTED_VLLM}, this is vLLM {version}"
    if Version(parse_version(version).base_version) < OLDEST:
        return f"{ours} (install a newer vLLM)"
    package = Path(vllm.__file__)
    if not package.with_suffix(".py").is_file():
        return (
            f"{ours} without its sources, so what vllm-dflash relies on cannot be checked (install"
            " a vLLM with its .py files)"
        )
    difference = first_difference(seams, tuple(files), package.parents[1], version)
    if difference is None:
        return None
    return f"{ours}: {difference} (install a vllm-dflash for this vLLM, or a vLLM in that range)"


def check_vllm(seams: Seams) -> None:
    """Refuse a vLLM that these seams do not fit. Raises `UnsupportedVllmError`."""
    if why := why_unfit(seams):
        raise UnsupportedVllmError(why)


@lru_cache(maxsize=8)
def first_difference(
    seams: Seams, files: tuple[Path, ...], folder: Path, version: str
) -> str | None:
    """First seam or import that the vLLM in `folder` lacks, or has with other parameters, or None.

    Reading the sources takes half a second, and a process may start many engines.
    """
    return next(_differences(seams, files, Sources(folder), version), None)


def _differences(
    seams: Seams, files: Iterable[Path], sources: Sources, version: str
) -> Iterator[str]:
    for seam in seams:
        if seam.versions and not seam.is_in(version):
            continue
        try:
            _, node = sources.find(seam.path)
        except MissingError as error:
            yield f"it has no {seam.path}, because {error}"
            continue
        if not seam.accepts(found := parameters_of(node)):
            yield f"{seam.path} takes ({found}), not ({seam.parameters})"
    if untested(version):
        for names in sorted(map(sorted, imported_by(files))):
            if not any(map(sources.has, names)):
                yield f"it has no {' or '.join(names)}"
