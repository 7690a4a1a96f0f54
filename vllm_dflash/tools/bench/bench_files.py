"""The files a benchmark leaves."""

from __future__ import annotations

from pathlib import Path

from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.bench_report import make_tables, standing
from vllm_dflash.tools.bench.plot import plot
from vllm_dflash.tools.bench.results import Results
from vllm_dflash.tools.bench.time_parts import parts_tables, plot_parts
from vllm_dflash.tools.tables import Table


def tables_of(record: Record) -> list[Table]:
    """Those of `result.md`."""
    return make_tables(Results(record.sides, record.measurements)) + parts_tables(record.where)


def standing_of(record: Record) -> list[Table]:
    """What is to be seen after a round that is not the last."""
    return standing(Results(record.sides, record.measurements))


def write_report(record: Record, out: Path) -> None:
    """Write `result.json`, `result.md` and `result.png`, and `where.png` if that was asked for."""
    record.write(out / "result.json")
    tables = (table.markdown() for table in tables_of(record))
    sections = [header(record), *tables, "![](result.png)\n"]
    plot(Results(record.sides, record.measurements), out / "result.png")
    if record.where:
        plot_parts(record.where, out / "where.png")
        sections.append("![](where.png)\n")
    (out / "result.md").write_text("\n".join(sections))


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
