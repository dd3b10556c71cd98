"""Makes the recipe's data: a store whose samples are documents of tokens.

    python prepare.py data                       # texts that Debian's base-files and perl ship
    python prepare.py data --texts folder        # your own: text files in UTF-8

A token is a byte; 256 ends a document. With a tokenizer of your own: `headrace tokenize`.
It does nothing where the store is there already, so it may stand in every batch script.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import headrace as hr

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = ("/usr/share/common-licenses", "/usr/share/perl", "/usr/share/doc/base-files")
ENDINGS = ("", ".txt", ".md", ".pod")
END = 256


def documents(folders: list[str]) -> Iterator[tuple[str, bytes]]:
    """(name, tokens) of each text, uint16."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix not in ENDINGS or path.is_symlink() or not path.is_file():
                continue
            tokens = np.append(np.frombuffer(path.read_bytes(), np.uint8), np.uint16(END))
            yield str(path), tokens.astype(np.uint16).tobytes()


def main() -> None:
    """Pack the texts, unless they are packed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="gets train.hr")
    parser.add_argument("--texts", action="append", help="a folder of text files; repeat for more")
    options = parser.parse_args()
    store = options.target / "train.hr"
    if (store / "store.json").is_file():
        print(f"{store} is there already")
        return
    options.target.mkdir(parents=True, exist_ok=True)
    report = hr.pack(lambda: documents(options.texts or list(SHIPPED)), store)
    print(f"{report.samples:,} documents, {report.bytes // 2:,} tokens: {store}")


if __name__ == "__main__":
    main()
