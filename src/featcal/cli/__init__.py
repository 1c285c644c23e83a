"""The command line: each command is one call into the library."""

from featcal.cli import compare, fit, packs, report, train
from featcal.cli.app import group, main

MAKING = (compare.demo, train.train, packs.collect, fit.fit, fit.predict, packs.export, packs.pack)
LOOKING = (fit.evaluate, compare.compare, train.history, report.report, report.explore)
for command in (*MAKING, *LOOKING, report.paper):
    group.add_command(command)

__all__ = ["main"]
