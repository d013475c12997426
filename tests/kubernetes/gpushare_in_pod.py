"""`gpushare` with the service account in a folder of a test: nothing else may write the folder of a real pod.

python -m tests.kubernetes.gpushare_in_pod FOLDER COMMAND ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpushare_spawner import cli
from gpushare_spawner.clients import service_account

if __name__ == "__main__":
    service_account.FOLDER = Path(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
