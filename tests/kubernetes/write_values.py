"""Writes jupyterhub_config.d/ into helm-values/jupyterhub.yaml: python -m tests.kubernetes.write_values"""

from __future__ import annotations

from tests.kubernetes.charts import ROOT, VALUES

FILE = VALUES / "jupyterhub.yaml"
INDENT = " " * 8


def main() -> None:
    lines: list[str] = []
    skipping = False
    for line in FILE.read_text().splitlines():
        if skipping and (not line or line.startswith(INDENT)):
            continue
        skipping = False
        lines.append(line)
        if line.strip() == "stringData: |":
            name = lines[-2].rpartition("/")[2]
            text = (ROOT / "jupyterhub_config.d" / name).read_text()
            lines += [INDENT + part if part else "" for part in text.splitlines()]
            skipping = True
        elif line == "proxy:":
            lines.insert(-1, "")
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
