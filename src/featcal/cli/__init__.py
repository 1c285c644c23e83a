"""The command line: each command is one call into the library."""

from featcal.cli import compare, export, fit, packs, paper, report, train
from featcal.cli.app import group, main

MAKING = (compare.demo, train.train, packs.collect, fit.fit, fit.predict, export.export, packs.pack)
LOOKING = (fit.evaluate, compare.compare, report.report, report.explore, train.history, paper.paper)
for command in (*MAKING, *LOOKING):
    group.add_command(command)

__all__ = ["main"]
