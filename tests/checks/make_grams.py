# ruff: noqa: E501
"""Makes `rltop/checks/grams.py`: the sequences of four characters that are frequent in languages of Latin letters.

    python -m tests.checks.make_grams FOLDER > rltop/checks/grams.py

FOLDER holds one UTF-8 text per language, `NAME.txt`; several languages that are close may share a name
(`LANGUAGES` says how). The shipped table was counted over the translations and manuals of Debian packages (libreoffice-help-*,
libreoffice-l10n-*, manpages-*) and, for `code`, over the sources of Python, Perl and C++ libraries. A table holds
counts alone, no text of them.
"""

from __future__ import annotations

import base64
import sys
import zlib
from collections import Counter
from pathlib import Path

from rltop.checks.language import GRAM, normal

LANGUAGES: dict[str, tuple[str, ...]] = {
    "en": ("en-US",), "de": ("de",), "fr": ("fr",), "es": ("es", "ast", "gl"), "pt": ("pt-BR", "pt", "pt_BR"), "it": ("it",),
    "ca": ("ca", "oc"), "nl": ("nl", "af"), "sv": ("sv",), "da": ("da", "nb", "nn"), "is": ("is",), "pl": ("pl", "szl"),
    "cs": ("cs", "sk"), "hr": ("hr", "bs", "sl", "sr@latin"), "hu": ("hu",), "fi": ("fi",), "et": ("et",), "ro": ("ro",),
    "tr": ("tr", "uz"), "vi": ("vi",), "id": ("id",), "lt": ("lt",), "lv": ("lv",), "eu": ("eu",), "cy": ("cy",),
    "ga": ("ga", "gd"), "eo": ("eo",), "zu": ("zu", "xh", "ss", "nr"), "st": ("st", "tn", "nso", "ts"), "om": ("om", "rw"),
    "code": ("code",),
}  # fmt: skip
"""Name of a table -> names of the texts it is counted over. At most 31: a language is one bit."""
KEEP = {"en": 1600, "code": 1600}
KEEP_ELSE = 800
"""Most frequent sequences that are kept, per table."""
COUNTED = 400_000
"""Characters of each text that are counted."""


def frequent(texts: list[str], keep: int) -> list[str]:
    """The most frequent sequences; each text counts the same, whatever its length."""
    rates: Counter[str] = Counter()
    for text in texts:
        plain = normal(text[: 2 * COUNTED])[:COUNTED]
        counts = Counter(plain[i : i + GRAM] for i in range(len(plain) - GRAM + 1))
        for gram, count in counts.items():
            if count > 1:
                rates[gram] += count / len(plain)  # type: ignore[assignment]
    return [gram for gram, _ in rates.most_common(keep)]


def source(folder: Path) -> str:
    """The module's text."""
    masks: Counter[str] = Counter()
    for bit, (name, files) in enumerate(LANGUAGES.items()):
        texts = [(folder / f"{file}.txt").read_text("utf-8") for file in files]
        for gram in frequent(texts, KEEP.get(name, KEEP_ELSE)):
            masks[gram] |= 1 << bit
    blob = "\n".join(f"{gram}{mask:x}" for gram, mask in sorted(masks.items())).encode()
    packed = base64.b85encode(zlib.compress(blob, 9)).decode()
    lines = "\n".join(f'    "{packed[i : i + 112]}"' for i in range(0, len(packed), 112))
    return (
        f'# ruff: noqa: E501\n"""{len(masks)} sequences of four characters and the languages in which they are frequent.\n\n'
        "Made by `tests/checks/make_grams.py`; do not edit. Lines `<four characters><hexadecimal mask>`, bit i for the i-th name\n"
        'of `NAMES`; zlib, then Base85.\n"""\n\n'
        "from __future__ import annotations\n\n"
        f"NAMES = {tuple(LANGUAGES)!r}\n".replace("'", '"')
        + f"PACKED = (\n{lines}\n)\n"
    )


if __name__ == "__main__":
    sys.stdout.write(source(Path(sys.argv[1])))
