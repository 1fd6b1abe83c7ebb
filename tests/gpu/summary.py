"""Merges pytest's reports of several runs into one, and prints what failed.

`summary.py count FILE` prints the counts of a report; `summary.py merge FOLDER OUT` merges reports and lists failures.
"""

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

MESSAGE_LENGTH = 160


def suites_of(path: Path) -> list[ET.Element]:
    """The test suites of a report; none if pytest died before writing it."""
    try:
        return list(ET.parse(path).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return []


def counts(suites: Iterable[ET.Element]) -> tuple[int, int, int]:
    """Passed, failed (errors too) and skipped."""
    passed = failed = skipped = 0
    for suite in suites:
        bad = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        failed += bad
        skipped += int(suite.attrib["skipped"])
        passed += int(suite.attrib["tests"]) - bad - int(suite.attrib["skipped"])
    return passed, failed, skipped


def failures(suites: Iterable[ET.Element]) -> list[str]:
    """`file::test: first line of the reason` of each test that failed."""
    found = []
    for suite in suites:
        for case in suite.iter("testcase"):
            for kind in ("failure", "error"):
                if (problem := case.find(kind)) is not None:
                    reason = (problem.get("message") or "").strip().splitlines() or ["no reason given"]
                    place = case.get("classname", "").rpartition(".")[2]
                    found.append(f"{place}::{case.get('name')}: {reason[0][:MESSAGE_LENGTH]}")
    return found


def merge(folder: Path, out: Path) -> list[ET.Element]:
    """Merge the suites of all reports in a folder and write them to `out`."""
    root = ET.Element("testsuites")
    for path in sorted(folder.glob("*.xml")):
        root.extend(suites_of(path))
    ET.ElementTree(root).write(out, encoding="utf-8", xml_declaration=True)
    return list(root)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["count", path]:
            suites = suites_of(Path(path))
            passed, failed, skipped = counts(suites)
            print(f"{passed} passed, {failed} failed, {skipped} skipped" if suites else "no report: pytest died")
        case ["merge", folder, out]:
            for line in failures(merge(Path(folder), Path(out))):
                print(line)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
