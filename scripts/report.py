"""Write one HTML page about a run, or several side by side: curves, pictures over time, options.

    python scripts/report.py logs/RUN                               writes logs/RUN/report.html
    python scripts/report.py logs/RUN logs/OTHER [--output FILE]    one page about both, here

scripts/train.py writes the page of its own run after every epoch. Open it in a browser; it needs no network.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.report import write_report
from ddpo_pytorch.run_plan import load_config

BASE_CONFIG = Path(__file__).resolve().parent.parent / "config" / "base.py"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: python scripts/report.py RUN [RUN ...] [--output FILE]")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="A run's folder.")
    parser.add_argument("--output", type=Path, help="File to write; by default RUN/report.html, of several ones here.")
    try:
        arguments = parser.parse_args()
        folders = list({folder.resolve(): folder for folder in arguments.runs}.values())
        output = arguments.output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        base = load_config(str(BASE_CONFIG)).to_dict() if BASE_CONFIG.is_file() else None
        print(write_report(folders, output, base))
    except ConfigError as wrong:
        sys.exit(f"error: {wrong}")


if __name__ == "__main__":
    main()
