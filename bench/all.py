"""The suite: `python -m bench.all [NAME]... [--full]` runs its benchmarks one after the other, then writes the report.

Each runs in a process of its own, so that it has the device and its memory to itself and none stops the others.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.common import RESULTS
from bench.report import write_report

SUITE = (
    "decode",
    "memory",
    "utilisation",
    "compilation",
    "masking",
    "decay",
    "batches",
    "training",
    "chunks",
    "kernels",
    "parallel",
)


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=f"Of {', '.join(SUITE)}.")] = None,
    full: Annotated[
        bool | None, typer.Option("--full/--small", help="Published sizes.", show_default="full but on a CPU")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run the suite, or the benchmarks named, and write the report."""
    if unknown := [name for name in names or () if name not in SUITE]:
        raise typer.BadParameter(f"got {', '.join(unknown)}, wanted some of {', '.join(SUITE)}")
    options = [] if full is None else ["--full" if full else "--small"]
    failed = []
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for name in names or SUITE:
        command = [sys.executable, "-m", f"bench.{name}", "--out", str(out), *options]
        if subprocess.run(command, check=False, env=environ).returncode:
            failed.append(name)
    typer.echo(f"wrote {write_report(out)}")
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
