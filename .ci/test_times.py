#!/usr/bin/env python3
"""Seconds that each test file took, slowest first: for SLOWEST_FIRST in tests/conftest.py.

make test TESTS="--junitxml=times.xml" && python3 .ci/test_times.py times.xml
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path


def main(reports: list[str]) -> int:
    """Print the files of these reports that took 5 s or more."""
    if not reports:
        print(__doc__, file=sys.stderr)
        return 2
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            seconds[f"{case.get('classname', '').replace('.', '/')}.py"] += float(case.get("time", 0))
    for name, took in sorted(seconds.items(), key=lambda known: -known[1]):
        if took >= 5 and Path(name).is_file():
            print(f"{took:7.1f} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
