#!/usr/bin/env python3
"""Writes patches/manifest.toml: the SimpleFSDP files of torchtitan's releases, before and after the mend.

    .venv/bin/python scripts/manifest.py            writes it
    .venv/bin/python scripts/manifest.py --check    says whether it is as it would be written: status 0 or 1

The releases come from the package index, once; see tests/releases.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from placement_audit.mend import checkout, files  # noqa: E402
from placement_audit.mend.backups import digest  # noqa: E402
from placement_audit.mend.look import look  # noqa: E402
from placement_audit.mend.manifest import Entry, rendered  # noqa: E402
from placement_audit.mend.result import Form  # noqa: E402
from tests.releases import VERSIONS, release  # noqa: E402

MANIFEST = ROOT / "patches" / "manifest.toml"


def entries(version: str, folder: Path) -> list[Entry]:
    """The manifest's entries for one release, unpacked in a folder."""
    found = checkout.find(str(folder))
    made = []
    for path in found.files:
        source = files.read(path, found.root)
        after = {form: digest(source.changed(look(source, form).text).after) for form in Form}
        made.append(Entry(release=version, path=str(source.shown), before=source.sha256, after=after))
    return made


def text() -> str:
    """The whole manifest."""
    made = []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            made += entries(version, release(version, Path(folder)))
    return rendered(made)


def main() -> int:
    """Write or check the manifest."""
    new = text()
    if "--check" in sys.argv[1:]:
        if MANIFEST.read_text(encoding="utf-8") == new:
            return 0
        print(f"{MANIFEST}: not as the mend makes it; run scripts/manifest.py", file=sys.stderr)
        return 1
    MANIFEST.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
