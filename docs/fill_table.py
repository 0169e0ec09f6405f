"""Run the command that stands above the table of ``which-policy.md``, and put in what it prints.

python docs/fill_table.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "which-policy.md"
COMMAND = (
    "optuna-hermes simulate examples/curves/*.npz --seeds 3 --policy "
    "hermes,hermes-slope,slaq,las,asha,freeze-thaw,asha-stop,median-stop,hyperband-stop,oracle-breadth"
)


def main() -> None:
    """Everything between the two marks is replaced."""
    shown = subprocess.run(
        ["bash", "-c", COMMAND], cwd=HERE.parent, capture_output=True, text=True, check=True
    ).stdout
    table = "\n".join(line.rstrip() for line in shown.split("\nof work:")[0].splitlines()).strip()
    block = f"<!-- table -->\n```bash\n{COMMAND}\n```\n\n```text\n{table}\n```\n<!-- /table -->"
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"<!-- table -->.*<!-- /table -->", lambda _: block, page, flags=re.S))


if __name__ == "__main__":
    main()
