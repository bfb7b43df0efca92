"""Print the PrometheusRule that holds deploy/prometheus/rules.yml, for Prometheus' operator."""

from __future__ import annotations

import sys
from pathlib import Path

HEAD = """# Made from deploy/prometheus/rules.yml by `make docs`; change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: unbind
  labels:
    app: unbind
spec:
"""


def main() -> None:
    """Print the manifest."""
    rules = Path(__file__).parent.parent / "deploy/prometheus/rules.yml"
    lines = rules.read_text(encoding="utf-8").splitlines(keepends=True)
    body = lines[lines.index("groups:\n") :]
    sys.stdout.write(HEAD + "".join(f"  {line}" if line.strip() else line for line in body))


if __name__ == "__main__":
    main()
