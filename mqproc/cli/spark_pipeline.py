"""`mqproc spark pipeline`: the example of a declarative pipeline, over the demo's flights."""

from __future__ import annotations

from pathlib import Path

import click

from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.errors import ConfigurationError


@click.command(cls=Command)
@click.option("--to", type=click.Path(path_type=Path), default="mqproc-pipeline", show_default=True, help="Its folder.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.")
@pass_invocation
def pipeline(invocation: Invocation, to: Path, master: str, conf: tuple[str, ...]) -> None:
    """Run the example pipeline over the demo's flights.

    mqproc demo --store DIR makes the store. Tables, as Parquet below --to: flights, hourly_counts, carrier_delays, and
    dead_letters. The code lies there too, to be changed; another run makes the tables anew.
    """
    from mqproc.cli.spark_session import setting

    try:
        from mqproc.spark.pipeline.running import TABLES, prepare, run
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[pipelines,spark]'") from None
    folder = prepare(to, invocation.existing_paths().root)
    run(folder, master, dict(setting(each) for each in conf))
    rows = [{"table": name, "rows": folder.rows(name), "folder": str(folder.table(name))} for name in TABLES]
    invocation.out.rows("tables", [Column("table"), Column("rows", kind="count"), Column("folder")], rows)
