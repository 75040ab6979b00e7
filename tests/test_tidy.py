"""The house rules as a test; each message names the place and the remedy."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ibshell", "agent", "fedpool")
LINES_MAX = 600
FUNCTION_LINES_MAX = 70
BANNED_MODULES = {"utils", "helpers", "helper", "manager", "common", "misc", "info"}
TOP_LEVEL = {
    *PACKAGES, "ext", "tests", "site", "pyproject.toml", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "LICENSE", "Makefile", "MANIFEST.in", ".ci", ".gitignore",
}  # fmt: skip


def test_the_top_level_is_what_it_should_be():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout")
    assert {line.split("/")[0] for line in done.stdout.splitlines()} <= TOP_LEVEL


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_rooms_hold_one_subject():
    for path in sources(*PACKAGES):
        count = len(path.read_text().splitlines())
        assert count <= LINES_MAX, (
            f"{path.relative_to(ROOT)}: {count} lines; past {LINES_MAX} it holds two subjects, split it"
        )


def test_functions_are_short():
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= FUNCTION_LINES_MAX, (
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines"
                )


def test_every_file_says_what_it_is_for():
    for path in sources(*PACKAGES):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)}: no opening paragraph"


def test_modules_are_nouns_of_the_domain():
    for path in sources(*PACKAGES):
        assert path.stem not in BANNED_MODULES, f"{path.relative_to(ROOT)}: name it after what it holds"


def test_nothing_is_left_over():
    for path in sources(*PACKAGES, "tests", "ext"):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", line)
            assert not found, f"{path.relative_to(ROOT)}:{number}: {found[0]}: do it or file it"


def test_known_hosts_are_never_switched_off():
    for path in sources(*PACKAGES):
        assert "known_hosts=None" not in path.read_text(), f"{path.relative_to(ROOT)}: pin the key instead"


def test_the_documentation_site_is_not_ignored():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert not {"site", "site/", "/site", "/site/"} & set(lines), "the documentation would silently never be committed"
    assert not list((ROOT / "site").glob("*.py")), "site/ is no package"


def test_commands_named_in_the_documentation_exist():
    from ibshell.cli import COMMANDS, PLURALS

    known = {*COMMANDS, *PLURALS}
    for path in [ROOT / "README.md", *sorted((ROOT / "site").glob("*.md"))]:
        for word in re.findall(r"(?m)^\s*(?:\$ )?ibshell ([a-z]+)", path.read_text()):
            assert word in known, f"{path.name}: there is no command `ibshell {word}`"
