"""Migrates a copy of a checkout by the command, and counts what it did."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import report

_MIGRATE = (sys.executable, "-m", "tfmp.migrate")

#: The files of a checkout that are not copied: no script needs them, and they may be large.
_IGNORED = shutil.ignore_patterns(".git", "*.ipynb", "results", "checkpoints")


class Migration(NamedTuple):
    """The results of a migration.

    Attributes:
        files: The number of Python files.
        edited: The number of files that the migration rewrites.
        edits: The number of places that the migration rewrites, by rule.
        findings: The number of lines that the migration leaves to a human, by rule.
        notes: The number of lines that the migration only reports, by rule.
        messages: The files that cannot be migrated, then all findings and notes as `file:line: rule: message`.
    """

    files: int
    edited: int
    edits: Counter[str]
    findings: Counter[str]
    notes: Counter[str]
    messages: list[str]


def copy_checkout(checkout: Path, copy: Path) -> None:
    """Copy a checkout without the files that no script needs.

    Args:
        checkout: The directory of the checkout.
        copy: The directory of the copy, which does not exist yet.
    """
    shutil.copytree(checkout, copy, ignore=_IGNORED)


def migrate(copy: Path) -> Migration:
    """Migrate a directory in place.

    Args:
        copy: The copy of a checkout; its files are rewritten.

    Returns:
        The report of the command.

    Raises:
        RuntimeError: The command failed.
    """
    return parse_migration(_run_migrate("--json", "--write", str(copy)), copy)


def parse_migration(text: str, root: Path) -> Migration:
    """Read the report of `tfmp.migrate --json`.

    Args:
        text: The report, as JSON.
        root: The directory that the paths in messages are relative to.

    Examples:
        >>> edits = [{"rule": "R1", "line": 3}, {"rule": "R2", "line": 7}]
        >>> findings = [{"rule": "R10", "line": 9, "message": "counted twice"}]
        >>> files = [{"path": "/bert/a.py", "edits": edits, "findings": findings}, {"path": "/bert/b.py"}]
        >>> migration = parse_migration(json.dumps({"files": files}), Path("/bert"))
        >>> migration.files, migration.edited, dict(migration.edits), migration.messages
        (2, 1, {'R1': 1, 'R2': 1}, ['a.py:9: R10: counted twice'])
    """
    files = json.loads(text).get("files", [])
    edits = [(each, edit) for each in files for edit in each.get("edits", [])]
    findings = [(each, finding) for each in files for finding in each.get("findings", [])]
    return Migration(
        files=len(files),
        edited=sum(bool(each.get("edits")) for each in files),
        edits=Counter(str(edit.get("rule")) for _, edit in edits),
        findings=Counter(str(got.get("rule")) for _, got in findings if got.get("level") != "note"),
        notes=Counter(str(got.get("rule")) for _, got in findings if got.get("level") == "note"),
        messages=[
            *(f"{_relative(each['path'], root)}: {each['error']}" for each in files if each.get("error")),
            *(
                f"{_relative(each['path'], root)}:{got.get('line')}: {got.get('rule')}: "
                f"{got.get('message', '')} {got.get('detail', '')}".rstrip()
                for each, got in findings
            ),
        ],
    )


def migration_table(migration: Migration) -> str:
    """Return the numbers of rewritten places, findings and notes, by rule, as a Markdown table.

    Args:
        migration: The results of the migration.
    """
    counts = (migration.edits, migration.findings, migration.notes)
    rules = sorted(set().union(*counts), key=lambda rule: (len(rule), rule))
    rows = [[rule, *(str(count[rule]) for count in counts)] for rule in rules]
    total = f"in all, {migration.edited} of {migration.files} files"
    rows.append([total, *(str(count.total()) for count in counts)])
    return report.table(["rule", "rewritten", "left to a human", "noted"], rows)


def _run_migrate(*arguments: str) -> str:
    command = [*_MIGRATE, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    # The command returns 1 if it leaves something to a human.
    if ended.returncode not in (0, 1) or (ended.returncode == 1 and not ended.stdout):
        raise RuntimeError(f"`{' '.join(command)}` ended with status {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout


def _relative(path: str, root: Path) -> str:
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
