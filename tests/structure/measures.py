"""Measure the structure and the prose of the product's source.

`python -m tests.structure.measures [PATH ...]` prints the figures and every violation under the given paths.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("mqproc", "supervisor")
GENERATED = "# Generated"
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 8
COMPLEXITY_MAX = 15
FRAGMENT_LINES = 100
SUMMARY_MAX = 90
TEST_NAME_MAX = 70

# Phrases that hide the meaning of a sentence. Each has a plain replacement: see CONTRIBUTING in mqproc/README.md.
BANNED = {
    "free relative clause": r"\b[Ww]hat "
    r"(?:is|was|it|are|were|has|had|they|a|an|the|he|she|one|its|no|may|can|could|must)\b",
    "'is none'": r"\b(?:is|are|was|were|be|be an?|has|have|holds?|that) none\b",
    "a person as subject": r"\b(?:[Ww]hoever|[Ss]omebody|[Nn]obody|[Ww]ho) \w+|\b(?:somebody|nobody)\b",
    "'behind' for 'after'": r"\b(?:lies|lie|lay|stands|comes|come|goes|go|what is|one|bytes|all|follows) behind\b"
    r"|\bbehind (?:it|them|each other|one another|this|that|those)\b",
    "'of before'": r"\b(?:of|as|from|than) before\b",
    "'tell'": r"\b(?:[Tt]ells?|[Tt]old|[Tt]elling)\b",
    "'comes again'": r"\b(?:comes?|came|come) (?:again|back again)\b",
    "'mend'": r"\b[Mm]end(?:s|ed|ing)?\b",
    "'makes it again'": r"\b(?:make|makes|made|making) (?:\w+ )?(?:again|anew)\b",
    "'anew'": r"\banew\b",
    "'goes on'": r"\b(?:[Gg]oes|[Gg]o|[Ww]ent|[Gg]oing) on\b",
    "'stands'": r"\b(?:[Ss]tands?|[Ss]tood)\b",
    "'just then'": r"\bjust then\b",
    "'set aside'": r"\b(?:[Mm]oves?|[Mm]oved|[Ss]et|[Pp]ut|[Gg]oes|go|gone) aside\b",
}
# Values of --json keys, which programs compare: they keep their words.
JSON_VALUES = {'"move aside"', '"make anew"'}
# A keyword parameter of Client.replay.
TOLD_PARAMETER = "`told`"
_BANNED = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED.values()))


def modules(paths: tuple[str, ...] = PRODUCT) -> list[Path]:
    """Python files of the product, without generated ones and without the supervisor's symlink."""
    found = []
    for name in paths:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents) and not is_generated(file):
                found.append(file)
    return found


def is_generated(path: Path) -> bool:
    with path.open() as file:
        return file.readline().startswith(GENERATED)


def name_of(path: Path) -> str:
    """Dotted name by which a module is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "supervisor":
        parts.insert(0, "mqproc")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, known: frozenset[str] | set[str]) -> set[str]:
    """Modules of the product that a module imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {name_of(path)}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string of a Python file; of another file the lines outside of code blocks."""
    text = path.read_text()
    if path.suffix != ".py":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced:
                yield number, line
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string in JSON_VALUES:
            continue
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            for offset, line in enumerate(token.string.split("\n")):
                yield token.start[0] + offset, line


def banned_phrases(path: Path) -> list[tuple[int, str]]:
    prose = ((line, text.replace(TOLD_PARAMETER, "")) for line, text in prose_of(path))
    return [(line, match.group()) for line, text in prose for match in _BANNED.finditer(text)]


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """McCabe's cyclomatic complexity; nested functions count for themselves."""
    count = 1
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(
            node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.IfExp | ast.ExceptHandler | ast.match_case
        ):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        pending.extend(ast.iter_child_nodes(node))
    return count


def large_functions(path: Path) -> Iterator[str]:
    """Functions beyond the limits of lines, parameters or complexity. Kernels are compiled and exempt."""
    where = path.relative_to(ROOT)
    if str(where).startswith("mqproc/kernels/"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            document = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            skipped = (first.end_lineno or 0) - first.lineno + 1 if document else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - skipped
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            if lines > FUNCTION_LINES_MAX:
                yield f"{where}:{node.lineno}: {node.name} has {lines} lines"
            if count > PARAMETERS_MAX and not _is_public(node):
                yield f"{where}:{node.lineno}: {node.name} has {count} parameters"
            if (measured := complexity(node)) > COMPLEXITY_MAX:
                yield f"{where}:{node.lineno}: {node.name} has complexity {measured}"


def _is_public(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Commands take their options as parameters, and so do a client's methods with keywords only."""
    named = function.args.kwonlyargs
    return bool(function.decorator_list) or len(named) > PARAMETERS_MAX // 2


def long_summaries(path: Path) -> Iterator[str]:
    """First lines of docstrings that exceed the limit."""
    where = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            summary = (ast.get_docstring(node) or "").split("\n")[0]
            if len(summary) > SUMMARY_MAX:
                yield f"{where}:{getattr(node, 'lineno', 1)}: the docstring's first line has {len(summary)} characters"


def public_classes() -> dict[str, list[str]]:
    """Where each public class name of the product is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name_of(path))
    return found


def import_graph() -> dict[str, set[str]]:
    everything = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py") if path.exists()]
    paths = {name_of(path): path for path in everything if not any(parent.is_symlink() for parent in path.parents)}
    return {name: imports_of(path, paths.keys()) for name, path in paths.items()}


def fragments(graph: dict[str, set[str]]) -> list[str]:
    """Short modules whose only importer is in the same package."""
    importers = defaultdict(set)
    for name, imported in graph.items():
        for other in imported:
            importers[other].add(name)
    found = []
    for path in modules():
        name, lines = name_of(path), len(path.read_text().splitlines())
        if lines < FRAGMENT_LINES and path.name not in ("__init__.py", "__main__.py") and len(importers[name]) == 1:
            (importer,) = importers[name]
            if importer.rpartition(".")[0] == name.rpartition(".")[0]:
                found.append(f"{path.relative_to(ROOT)}: {lines} lines, imported by {importer} only")
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def private_uses(path: Path) -> Iterator[str]:
    """Private names of other modules that a file imports or reaches through a module."""
    where = path.relative_to(ROOT)
    aliases = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("mqproc", "tests", "grafana"):
            for alias in node.names:
                aliases.add(alias.asname or alias.name)
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    yield f"{where}:{node.lineno}: imports {alias.name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id not in aliases:
            continue
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            yield f"{where}:{node.lineno}: uses {node.value.id}.{node.attr}"


def long_test_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        if len(node.name) > TEST_NAME_MAX:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"


def report(paths: tuple[str, ...]) -> None:
    files = modules(paths)
    prefixes = tuple(str(ROOT / path) for path in paths)
    lines = sum(len(file.read_text().splitlines()) for file in files)
    print(f"{len(files)} modules, {lines:,} lines (without generated ones)")
    phrases = [(file, *found) for file in files for found in banned_phrases(file)]
    documents = [file for path in prefixes for file in Path(path).rglob("*.md") if Path(path).is_dir()]
    phrases += [(file, *found) for file in documents for found in banned_phrases(file)]
    for file, line, phrase in phrases:
        print(f"{file.relative_to(ROOT)}:{line}: banned: {phrase}")
    for file in files:
        for check in (large_functions, long_summaries, private_uses, long_test_names):
            for found in check(file):
                print(found)
    graph = import_graph()
    for found in fragments(graph):
        if found.startswith(paths):
            print("fragment:", found)
    for members in cycles(graph):
        print("import cycle:", *members)
    for name, places in public_classes().items():
        if len(places) > 1 and any(place.replace(".", "/").startswith(paths) for place in places):
            print(f"class {name} is defined in {', '.join(places)}")
    counts = Counter(str(file.relative_to(ROOT)) for file, _line, _phrase in phrases)
    print(f"{len(phrases)} banned phrases:", ", ".join(f"{name} {count}" for name, count in counts.most_common(20)))


if __name__ == "__main__":
    report(tuple(sys.argv[1:]) or PRODUCT)
