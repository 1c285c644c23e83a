"""Would the tests notice a wrong line? Small changes to core and metrics, each tried by tests.

    python experiments/mutants.py [--sample 400] [--seed 0] [--workers 2] [--only core/batch.py]

Every change of the kinds in `changes` is a mutant. Each is made in memory, in a process forked from
one that has torch imported and the tests collected; no file is touched. A first run of the tests,
without a change, tells which lines each test runs and how long it takes: a mutant meets the tests
that run its line, fastest first, as many as fit the budget. It is killed by the first that fails,
or by taking far more processor time than without it. Every tenth is tried unchanged, too, and
must survive. Writes results/mutants.json and the part of docs/trust.md (`--dry` prints alone).
"""

import argparse
import ast
import gc
import importlib
import importlib.machinery
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "featcal"
RESULTS, DOCS = ROOT / "results" / "mutants.json", ROOT / "docs" / "trust.md"
EQUIVALENT = ROOT / "experiments" / "mutants_equivalent.json"  # mutant -> why no test can tell
START, END = "<!-- mutants: made by experiments/mutants.py -->", "<!-- end of mutants -->"
SUITE = (
    *("tests/core", "tests/metrics", "tests/methods", "src/featcal/core", "src/featcal/metrics"),
    "tests/test_labels.py",
)
SKIPPED = "not auto"  # fits every recipe in every fold: minutes that show nothing of these modules
MEMORY, CONTROLS = 16 * 2**30, 10

SWAPPED = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt)},
    **{ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,)},
    **{ast.FloorDiv: (ast.Div,), ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,)},
    **{ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,), ast.LShift: (ast.RShift,)},
    **{ast.RShift: (ast.LShift,), ast.MatMult: (ast.Mult,)},
}
OPPOSITES = (("min", "max"), ("amin", "amax"), ("any", "all"), ("floor", "ceil"))
NAMES = dict(OPPOSITES) | {b: a for a, b in OPPOSITES}
# Calls whose first two arguments may change places, or whose swap no program survives.
EITHER_WAY = {"maximum", "minimum", "max", "min", "vecdot", "isinstance", "getattr", "zip"}
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    """One change: where it is, what it replaces, and the text of the file with it."""

    file: str
    line: int
    last: int
    function: str  # the outermost function it changes the inside of; empty if there is none
    place: str  # that function, or what is assigned or defined there
    kind: str
    was: str
    now: str
    number: int  # among equal changes of the same function
    text: str

    @property
    def name(self):
        """What it is known by while lines move."""
        again = f" #{self.number}" if self.number else ""
        return f"{self.file} {self.place}: {self.was} -> {self.now}{again}"

    def why_equivalent(self, known):
        """The reason why no test can tell it, known for the one or for its whole place."""
        return known.get(self.name) or known.get(f"{self.file} {self.place}")


# --- what is changed -----------------------------------------------------------------------------


def changes(node, parents):
    """(node to replace, kind, new text) of every change to a node."""
    above = parents[-1]
    match node:
        case ast.Compare():
            for place, op in enumerate(node.ops):
                for other in SWAPPED[type(op)]:
                    ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield node, "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp():
            for other in SWAPPED[type(node.op)]:
                yield node, "arithmetic", ast.BinOp(node.left, other(), node.right)
        case ast.BoolOp():
            yield node, "boolean", ast.BoolOp(SWAPPED[type(node.op)][0](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node, "not dropped", node.operand
        case ast.UnaryOp(op=ast.USub() | ast.Invert()):
            yield node, "arithmetic", node.operand
        case ast.Constant(value=bool() as value):
            yield node, "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, "constant", ast.Constant(value + 1)
        case ast.Constant(value=str() as value) if isinstance(above, ast.Compare):
            yield node, "constant", ast.Constant(value + "-")
        case ast.Name(id=name) if name in NAMES and isinstance(above, ast.Call):
            yield node, "opposite", ast.Name(NAMES[name])
        case ast.Attribute(value=value, attr=name) if name in NAMES and isinstance(above, ast.Call):
            yield node, "opposite", ast.Attribute(value, NAMES[name])
        case ast.Call(args=[first, second, *rest]):
            called = ast.unparse(node.func).rpartition(".")[2]
            starred = any(isinstance(each, ast.Starred) for each in (first, second))
            alike = ast.dump(first) == ast.dump(second)
            if called not in EITHER_WAY and not starred and not alike:
                swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
                yield node, "arguments swapped", swapped
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield node, "returns None", "return None"
        case ast.AugAssign():
            for other in SWAPPED[type(node.op)]:
                yield node, "arithmetic", ast.AugAssign(node.target, other(), node.value)
            yield node, "removed", "pass"
        case ast.Break():
            yield node, "removed", "continue"
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue():
            yield node, "removed", "pass"
        case ast.Assign(targets=[target]) if _again(target, node, parents):
            yield node, "removed", "pass"
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield from _negated(node.test)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield from _negated(test)


def _negated(test):
    """A comparison and a `not` have their own changes."""
    single = isinstance(test, ast.Compare) and len(test.ops) == 1
    if not single and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        yield test, "condition negated", ast.UnaryOp(ast.Not(), test)


def _again(target, node, parents):
    """Whether an assignment may go without leaving a name that nothing defines."""
    if not isinstance(target, ast.Name):
        return not isinstance(target, ast.Tuple)
    function = next((p for p in reversed(parents) if isinstance(p, ast.FunctionDef)), ast.Module())
    return any(
        each.arg == target.id
        if isinstance(each, ast.arg)
        else isinstance(each, ast.Name)
        and isinstance(each.ctx, ast.Store)
        and each.id == target.id
        and each.lineno < node.lineno
        for each in ast.walk(function)
    )


def left_out(node, parents):
    """Whether nothing in a node can change what a program does, or its wording alone."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.arg():
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict" | "stacklevel"):
            return True  # a docstring; a check of our own; where a warning points
        case ast.Assign(targets=[ast.Name(id=name)]) if isinstance(parents[-1], ast.Module):
            return name == "__all__" or (name[0].isupper() and not name.isupper())  # a type
    return isinstance(parents[-1], ast.Raise) if parents else False  # what a refusal says


def children(node):
    """The parts of a node that run: no annotations and no decorators."""
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases", "pattern"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield each


def mutants_of(path):
    """Every mutant of a file."""
    text = path.read_text()
    raw, seen = text.encode(), Counter()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node, parents):
        if left_out(node, parents):
            if isinstance(node, ast.Raise):
                yield from made(node, parents)
            return
        if parents:
            yield from made(node, parents)
        for child in children(node):
            yield from walk(child, [*parents, node])

    def made(node, parents):
        for target, kind, new in changes(node, parents):
            new = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            lines = raw[begin:end].count(b"\n") * "\n"  # what follows stays where it was
            put = f"{new}{lines}" if isinstance(target, ast.stmt) else f"({new}{lines})"
            mutated = (raw[:begin] + put.encode() + raw[end:]).decode()
            function = function_of([*parents, node])
            where = path.relative_to(SOURCE).as_posix()
            was = " ".join(ast.unparse(target).split())
            place = function or defined([*parents, node])
            number = seen[place, was, new]
            seen[place, was, new] += 1
            lines = target.lineno, target.end_lineno
            yield Mutant(where, *lines, function, place, kind, was, new, number, mutated)

    return list(walk(ast.parse(text), []))


def function_of(path):
    """The outermost function whose body a node is in, with the classes around it."""
    names = []
    for node, child in pairwise(path):
        if isinstance(node, DEFINITIONS):
            names.append(node.name)
            if isinstance(node, ast.FunctionDef):
                return ".".join(names) if child in node.body else ""
    return ""


def defined(path):
    """What a node outside of functions is part of: a constant, a field, a function's defaults."""
    names = []
    for node in path:
        if isinstance(node, DEFINITIONS):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names.append(ast.unparse(target))
    return ".".join(names)


# --- how each is tried ---------------------------------------------------------------------------


def codes(text, path):
    """The code of every function of a file that is in no other: qualified name -> code."""
    found = {}

    def look(code):
        for each in code.co_consts:
            if isinstance(each, CodeType):
                is_class = each.co_flags & 2 == 0  # CO_NEWLOCALS: functions have it
                if is_class:
                    look(each)
                else:
                    found[each.co_qualname] = each

    look(compile(text, str(path), "exec", dont_inherit=True))
    return found


def alone(seconds, work):
    """What a forked process does: its work, unheard, in bounds, in a group that ends with it."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if seconds:
        most = int(5 * seconds) + 10
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return work()


def in_parallel(jobs, workers, told):
    """Runs (name, seconds, function) in forked processes; name -> exit status, signals below 0."""
    waiting, running, found = list(jobs)[::-1], {}, {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, seconds, work = waiting.pop()
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    status = alone(seconds, work)
                finally:
                    os._exit(status)
            running[pid] = name, time.monotonic() + (30 * seconds + 120 if seconds else 1e9)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            name, _ = running.pop(pid)
            found[name] = os.waitstatus_to_exitcode(status)
            told(name, found[name])
        for late in [pid for pid, (_, end) in running.items() if time.monotonic() > end]:
            os.killpg(late, signal.SIGKILL)
        if not pid:
            time.sleep(0.01)
    return found


@dataclass(frozen=True)
class Ran:
    """A test that passed: its seconds, and the lines it ran by file."""

    test: str
    seconds: float
    lines: dict[str, list[int]]


class Server:
    """A pytest plugin that forks where the tests would run."""

    def __init__(self, options, mutants, folder):
        self.options, self.mutants, self.folder, self.passed = options, mutants, folder, set()

    def pytest_runtestloop(self, session):
        """Surveys the tests, then tries every mutant that is a function's."""
        self.session = session
        session.config.pluginmanager.unregister(name="terminalreporter")
        workers = self.options.workers
        parts = [
            (n, 0, lambda n=n: self.survey(session.items[n::workers], n)) for n in range(workers)
        ]
        if any(in_parallel(parts, workers, lambda *_: None).values()):
            return True  # and found.json is missed
        ran = []
        for file in sorted(self.folder.glob("survey-*.json")):
            ran += [Ran(**each) for each in json.loads(file.read_text())]
        (self.folder / "survey.json").write_text(json.dumps([asdict(each) for each in ran]))
        print(f"{len(ran)} of {len(session.items)} tests pass")
        tests, items = chooser(ran, self.options.budget), {i.nodeid: i for i in session.items}
        jobs = []
        for place, mutant in enumerate(self.mutants):
            code = codes(mutant.text, SOURCE / mutant.file).get(mutant.function)
            inside = self.functions.get((mutant.file, mutant.function), [])
            if inside and all(code.co_freevars == each.__code__.co_freevars for each in inside):
                chosen, seconds = tests(mutant)
                chosen = [items[test] for test in chosen]
                if place % CONTROLS == 0:
                    jobs.append((f"-{place}", seconds, partial(self.tried, None, inside, chosen)))
                jobs.append((place, seconds, partial(self.tried, code, inside, chosen)))
        found = in_parallel(jobs, workers, teller(self.mutants))
        (self.folder / "found.json").write_text(json.dumps(found))
        return True

    def pytest_collection_modifyitems(self):
        """The functions to change, found before the tests' own set-up freezes the collector."""
        self.functions = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType and str(SOURCE) in each.__code__.co_filename:
                file = Path(each.__code__.co_filename).relative_to(SOURCE).as_posix()
                self.functions[file, each.__code__.co_qualname].append(each)

    def pytest_runtest_logreport(self, report):
        """Tells a test that passed from one that was skipped."""
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def survey(self, items, number):
        """Runs tests once, as they are, and writes what each ran, in processes it forks too."""
        import coverage

        measured = coverage.Coverage(data_file=None, include=[f"{SOURCE}/*"], config_file=False)
        seconds, own, leave = {}, os.getpid(), os._exit

        def left(status):
            if os.getpid() != own:
                (self.folder / f"lines-{own}-{os.getpid()}.json").write_text(json.dumps(lines()))
            leave(status)

        def lines():
            measured.stop()
            data, found = measured.get_data(), defaultdict(lambda: defaultdict(list))
            for file in data.measured_files():
                for line, tests in data.contexts_by_lineno(file).items():
                    for test in tests:
                        found[test][Path(file).relative_to(SOURCE).as_posix()].append(line)
            return found

        os._exit = left
        measured.start()
        for item, after in pairwise([*items, None]):
            measured.switch_context(item.nodeid)
            started, failed = time.process_time(), self.session.testsfailed
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.session.testsfailed == failed and item.nodeid in self.passed:
                seconds[item.nodeid] = time.process_time() - started
        os._exit, found = leave, lines()
        for file in self.folder.glob(f"lines-{own}-*.json"):
            for test, files in json.loads(file.read_text()).items():
                for where, more in files.items():
                    found[test][where] = sorted({*found[test][where], *more})
        ran = [asdict(Ran(test, seconds[test], dict(found[test]))) for test in seconds]
        (self.folder / f"survey-{number}.json").write_text(json.dumps(ran))
        return 0

    def tried(self, code, functions, items):
        """0 if no test fails with this code, None for none, in the place of the functions' own."""
        for function in functions:
            function.__code__ = code or function.__code__
        for item, after in pairwise([*items, None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.session.testsfailed:
                return 1
        return 0


def chooser(ran, budget):
    """The tests for a mutant: those that run its lines, fastest first, and their seconds.

    The fastest is tried even where it alone is over the budget.

    What is outside of functions runs when it is imported: all tests of the files of tests that run
    some line of its file.
    """
    by_line, near_file = defaultdict(list), defaultdict(set)
    for each in ran:
        for file, lines in each.lines.items():
            near_file[file].add(each.test.partition("::")[0])
            for line in lines:
                by_line[file, line].append(each)

    def tests(mutant):
        span = range(mutant.line, mutant.last + 1)
        inside = {each.test: each for line in span for each in by_line[mutant.file, line]}
        files = near_file[mutant.file]
        around = (each for each in ran if each.test.partition("::")[0] in files)
        near = inside.values() if mutant.function else around
        chosen, spent = [], 0.0
        for each in sorted(near, key=lambda each: each.seconds):
            if not chosen or spent + each.seconds <= budget:
                chosen.append(each.test)
                spent += each.seconds
        return chosen, max(spent, 0.01)

    return tests


def imported_anew(mutant, tests):
    """0 if no test fails in a process that imports the changed file."""
    import pytest

    load = importlib.machinery.SourceFileLoader.get_code
    path = str(SOURCE / mutant.file)

    def get_code(self, name):
        if self.path == path:
            return compile(mutant.text, path, "exec", dont_inherit=True)
        return load(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    status = pytest.main(["-x", *PYTEST, *files], plugins=[Chosen(tests)]) if tests else 0
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


class Chosen:
    """A pytest plugin that runs these tests, in this order."""

    def __init__(self, tests):
        self.order = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items):
        """Not every name of a test can be written on a command line."""
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])


PYTEST = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist", "-p", "no:faulthandler"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # hypothesis is imported before
)


def teller(mutants):
    """Prints how far it is, and each survivor as it is found."""
    started, done = time.monotonic(), Counter()

    def told(place, status):
        if isinstance(place, str):
            if status:
                print(f"  killed without a change: {mutants[-int(place)].name}")
            return
        done[status == 0] += 1
        if status == 0:
            mutant = mutants[place]
            print(f"  survived, line {mutant.line}: {mutant.name}")
        if done.total() % 50 == 0:
            spent = time.monotonic() - started
            print(f"{done.total()} tried, {done[True]} survived, {spent:.0f} s", flush=True)

    return told


def try_all(mutants, options):
    """Each mutant's exit status, 0 also where no test runs its line, and the tests used."""
    import hypothesis
    import pytest
    import torch

    for slow in ("numpy", "scipy.stats", "scipy.optimize", "sklearn.metrics", "torch.testing"):
        importlib.import_module(slow)  # once, for all

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "src"))
    # Told what to draw, no test passes by luck; a failure need not be made small.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=phases
    )
    hypothesis.settings.load_profile("mutants")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pid = os.fork()
        if not pid:
            try:
                server = Server(options, mutants, folder)
                pytest.main([*PYTEST, "-k", SKIPPED, *options.tests], plugins=[server])
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        if not (folder / "found.json").exists():
            raise SystemExit("The tests could not be collected or run: run pytest on them first")
        ran = [Ran(**each) for each in json.loads((folder / "survey.json").read_text())]
        found = json.loads((folder / "found.json").read_text())
    tests, jobs = chooser(ran, options.budget), []
    for place, mutant in enumerate(mutants):
        if str(place) not in found:
            chosen, seconds = tests(mutant)
            if place % CONTROLS == 0:
                same = replace(mutant, text=(SOURCE / mutant.file).read_text())
                jobs.append((f"-{place}", seconds + 5, partial(imported_anew, same, chosen)))
            jobs.append((place, seconds + 5, partial(imported_anew, mutant, chosen)))
    found |= in_parallel(jobs, options.workers, teller(mutants))
    return {str(place): status for place, status in found.items()}, len(ran)


# --- what is told --------------------------------------------------------------------------------


def summary(mutants, found, tests, everything, options, seconds):
    """The result file."""
    known = json.loads(EQUIVALENT.read_text())
    rows, survivors, told = defaultdict(Counter), [], {}
    for place, mutant in enumerate(mutants):
        status = found[str(place)]
        alike = status == 0 and mutant.why_equivalent(known) is not None
        slow = status in (-signal.SIGXCPU, -signal.SIGKILL)
        word = (
            "equivalent" if alike else "survived" if status == 0 else "slow" if slow else "failed"
        )
        rows[mutant.file][word] += 1
        if alike:
            told[mutant.name] = mutant.why_equivalent(known)
        elif status == 0:
            survivors.append({k: v for k, v in asdict(mutant).items() if k != "text"})
    made = Counter(mutant.file for mutant in everything)
    controls = [status for name, status in found.items() if name.startswith("-")]
    words = ("failed", "slow", "survived", "equivalent")
    return {
        "seed": options.seed,
        "made": len(everything),
        "tried": len(mutants),
        "suite": options.tests,
        "tests": tests,
        "budget_seconds": options.budget,
        "workers": options.workers,
        "controls": len(controls),
        "controls_killed": sum(map(bool, controls)),
        "seconds": round(seconds),
        "files": [
            {"file": file, "made": made[file], **{w: rows[file][w] for w in words}}
            for file in sorted(rows)
        ],
        "survivors": survivors,
        "equivalent": told,
    }


def shares(row):
    """Killed of those that are not known to be equivalent, in percent."""
    killed = row["failed"] + row["slow"]
    most = killed + row["survived"]
    return f"{100 * killed / most:.0f} %" if most else "-"


def page(results):
    """The part of docs/trust.md, from the result file alone."""
    words = ("failed", "slow", "survived", "equivalent")
    whole = {word: sum(row[word] for row in results["files"]) for word in words}
    whole |= {"file": "all", "made": results["made"]}
    parts = []
    for name in ("core", "metrics"):
        rows = [row for row in results["files"] if row["file"].startswith(name)]
        sums = {word: sum(row[word] for row in rows) for word in (*words, "made")}
        parts.append({"file": name, **sums})
    headings = "part | mutants | tried | survived | equivalent | killed"
    lines = [f"| {headings} |", "|---|" + "---:|" * 5]
    for row in [*parts, whole]:
        tried = sum(row[word] for word in words)
        cells = (row["file"], row["made"], tried, row["survived"], row["equivalent"], shares(row))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    told = [
        f"`make mutants` changes `core` and `metrics` in {results['made']:,} ways, one at a time, "
        f"and asks {results['tests']:,} tests (of {', '.join(f'`{t}`' for t in results['suite'])}) "
        f"whether they notice. {results['tried']:,} mutants "
        f"drawn with seed {results['seed']}, each tried by the tests that run its line, fastest "
        f"first, {results['budget_seconds']:g} s of them at most; out of time is five times their "
        f"processor time and 10 s. It took {results['seconds'] / 60:.0f} minutes with "
        f"{results['workers']} at a time (`WORKERS=`; `SAMPLE=0` for every mutant). Without a "
        f"change {results['controls_killed']} of {results['controls']} were killed.",
        "",
        "Changed are operators, conditions, numbers, words, defaults, the order of arguments, "
        "returned values and whole statements; not the wording of messages, and nothing that no "
        "program could tell. Killed is of those that are not known to be equivalent; survivors and "
        "equivalent ones are in `results/mutants.json`, with reasons.",
        "",
        *lines,
    ]
    return "\n".join(told)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=400, help="mutants to draw; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="mutants tried at a time")
    parser.add_argument("--budget", type=float, default=10, help="seconds of tests per mutant")
    parser.add_argument("--only", action="append", default=[], help="a file, as core/batch.py")
    parser.add_argument("--tests", nargs="+", default=list(SUITE), help="what may kill")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    os.chdir(ROOT)
    started = time.monotonic()
    files = [f for part in ("core", "metrics") for f in sorted((SOURCE / part).glob("*.py"))]
    everything = [m for f in files for m in mutants_of(f)]
    mutants = [m for m in everything if not options.only or m.file in options.only]
    if options.sample and options.sample < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    print(f"{len(mutants)} of {len(everything)} mutants")
    found, tests = try_all(mutants, options)
    spent = time.monotonic() - started
    results = summary(mutants, found, tests, everything, options, spent)
    for row in results["files"]:
        print(row, shares(row))
    if not options.dry:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        head, rest = DOCS.read_text().split(START)
        _, tail = rest.split(END)
        DOCS.write_text(f"{head}{START}\n{page(results)}\n{END}{tail}")
        print(f"Wrote {RESULTS.relative_to(ROOT)} and the part of {DOCS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
