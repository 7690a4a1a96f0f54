"""The files a benchmark leaves."""

from __future__ import annotations

from pathlib import Path

from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.bench_report import make_tables
from vllm_dflash.tools.bench.plot import plot
from vllm_dflash.tools.bench.results import Results
from vllm_dflash.tools.tables import Table


def write_report(record: Record, out: Path) -> list[Table]:
    """Write `result.json`, `result.md` and `result.png`. Returns the tables of `result.md`."""
    record.write(out / "result.json")
    results = Results(record.sides, record.measurements)
    tables = make_tables(results)
    sections = [header(record), *(table.markdown() for table in tables), "![](result.png)\n"]
    (out / "result.md").write_text("\n".join(sections))
    plot(results, out / "result.png")
    return tables


def header(record: Record) -> str:
    """The head of a Markdown report."""
    about = record.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    preloaded = ", ".join(about["preloaded"]) or "nothing"
    return "\n".join(
        [
            "# vllm-dflash bench",
            "",
            f"{record.rounds_complete} of {record.rounds} rounds are complete.",
            "",
            f"- pair: {about['pair']}",
            f"- versions: {versions}",
            f"- machine: {about['cpu']}, {about['cores']} cores; preloaded: {preloaded}",
            f"- command: `{about['command']}`",
            "",
        ]
    )
