"""Pack the built site for reading without a network: python tools offline_zip OUT.zip

Whoever unpacks it opens index.html. The same site gives the same bytes. If there is none,
it is built.
"""

import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import parser, run
from build_book import build_if_missing

FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # the earliest date that a ZIP file can hold
# Of no use on a disk.
ONLINE = {".buildinfo", ".sources", "404.html", "objects.inv", "sitemap.xml"}


def pack(out: Path, site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    with ZipFile(out, "w", ZIP_DEFLATED) as archive:
        for path in sorted(files, key=lambda path: path.relative_to(site).as_posix()):
            name = path.relative_to(site).as_posix()
            if name not in ONLINE:
                entry = ZipInfo(name, FIRST_DAY)
                entry.compress_type, entry.create_system = ZIP_DEFLATED, 3  # on any system
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, path.read_bytes())
    print(f"{out}: {len(archive.namelist())} files, {out.stat().st_size / 1e6:.1f} MB")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("out", type=Path, metavar="OUT.zip")
    args = options.parse_args()
    build_if_missing(args.root)
    pack(args.out, args.root / "_build" / "html")
    return 0


if __name__ == "__main__":
    run(main)
