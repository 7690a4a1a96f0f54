"""Whether this vLLM is one that our hooks fit: asked in the front end, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_dflash import __version__
from vllm_dflash.seams import FRONT_END, SUPPORTED_VLLM, Seams, UnsupportedVllmError, check_seams
from vllm_dflash.vllm_sources import MissingError, Sources, imported_by, parameters_of

OLDEST = min(Version(one.version) for one in SUPPORTED_VLLM)


def is_too_old(version: str) -> bool:
    """Whether it is older than all that we were made for; one that is no version is not."""
    try:
        return Version(version).release < OLDEST.release
    except InvalidVersion:
        return False


def untested(version: str) -> str:
    """What to say of a vLLM that tests do not run with; nothing of one that they do.

    They run with releases, of `SUPPORTED_VLLM`. What is in a later one, a prerelease, a nightly or
    a build without a version may be anything.
    """
    try:
        known = Version(version)
        if not known.is_prerelease and known.public in SUPPORTED_VLLM:
            return ""
    except InvalidVersion:
        pass
    return (
        f"vllm-dflash {__version__} was never tested with vLLM {version}, only with"
        f" {SUPPORTED_VLLM}. All that it relies on is there, so it runs."
    )


def why_unfit(elsewhere: Seams, files: Iterable[Path] = ()) -> str | None:
    """Why no engine is ours with this vLLM, and what to install; None where all fits.

    Args:
        elsewhere: seams of processes that are yet to start. Their sources are read, and not run.
        files: ours, that these import. Where tests do not run with this vLLM, what they import of
            it has to be there, too.
    """
    import vllm

    version = vllm.__version__
    ours = f"vllm-dflash {__version__} is made for vLLM {SUPPORTED_VLLM}, this is vLLM {version}"
    if is_too_old(version):
        return f"{ours} (install a newer vLLM)"
    sources = Sources(Path(vllm.__file__).parents[1])
    try:
        check_seams(FRONT_END)
        _check_sources(elsewhere, version, sources)
        if untested(version):
            _check_imports(files, sources)
    except UnsupportedVllmError as error:
        return f"{ours}: {error} (install a vllm-dflash for this vLLM, or a vLLM of that range)"
    return None


def _check_sources(seams: Seams, version: str, sources: Sources) -> None:
    for seam in seams:
        if seam.versions and not seam.is_in(version):
            continue
        try:
            _, node = sources.find(seam.path)
        except MissingError as error:
            raise UnsupportedVllmError(f"it has no {seam.path}, for {error}") from error
        if not seam.is_as_written(found := parameters_of(node)):
            raise UnsupportedVllmError(f"{seam.path} takes ({found}) and not ({seam.parameters})")


def _check_imports(files: Iterable[Path], sources: Sources) -> None:
    for names in sorted(map(sorted, imported_by(files))):
        if not any(map(sources.has, names)):
            raise UnsupportedVllmError(f"it has no {' or '.join(names)}")
