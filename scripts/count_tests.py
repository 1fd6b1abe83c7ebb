"""Prints `PASSED FAILED` of pytest runs from their JUnit XML reports.

Errors count as failed, skipped tests as neither.
"""

import sys
import xml.etree.ElementTree as ET


def count(paths: list[str]) -> tuple[int, int]:
    passed = failed = 0
    for suite in (suite for path in paths for suite in ET.parse(path).getroot().iter("testsuite")):
        bad = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        failed += bad
        passed += int(suite.attrib["tests"]) - bad - int(suite.attrib["skipped"])
    return passed, failed


if __name__ == "__main__":
    print(*count(sys.argv[1:]))
