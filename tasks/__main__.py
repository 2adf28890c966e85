"""`python -m tasks` writes docs/tasks.md; with --check it exits with 1 if the page is out of date."""

import sys
from pathlib import Path

from tasks.gallery import markdown


def main(arguments: list[str], page: Path = Path("docs/tasks.md")) -> int:
    if "--check" in arguments:
        return int(not page.exists() or page.read_text(encoding="utf-8") != markdown())
    page.parent.mkdir(exist_ok=True)
    page.write_text(markdown(), encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
